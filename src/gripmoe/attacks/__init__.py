"""One file per kind of attack, and the default ones in `run`."""
