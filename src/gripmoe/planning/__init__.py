"""The remaining jobs of a world and their cost, measured on fake tensors. Only `fake` and `counting` import torch."""
