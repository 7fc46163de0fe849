"""Files whole or not at all, locks, tensors that say whose they are, several processes."""
