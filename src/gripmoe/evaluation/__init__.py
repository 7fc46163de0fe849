"""Letter questions, MUSE, routing stability, the stop rule."""
