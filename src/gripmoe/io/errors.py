"""The error for mistakes that a user can correct. The command line shows its message without a traceback."""


class ConfigError(ValueError):
    """A mistake in a flag, a configuration, a file or a folder; the message names it and the remedy."""
