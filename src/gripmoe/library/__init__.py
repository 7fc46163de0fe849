"""The public face for training loops of your own: `constrain`, the Trainer callback, reparameterized routers."""
