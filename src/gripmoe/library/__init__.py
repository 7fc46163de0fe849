"""For your own training loops: `constrain`, the Trainer callback, Method B."""
