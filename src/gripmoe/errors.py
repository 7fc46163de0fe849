"""The error that stands for a mistake in what was given: the command line shows its message instead of a traceback."""


class ConfigError(ValueError):
    """A mistake in a flag, a configuration or a file; the message names the file, the key and the remedy."""
