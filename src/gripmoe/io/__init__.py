"""Files written whole or not at all, locks, tensor files with checked metadata, several processes."""
