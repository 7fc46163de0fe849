"""What may happen to a router while a model trains, and the hooks that hold it to that."""
