"""One file per attack, and the list of them in `run`."""
