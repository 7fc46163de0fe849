"""Objectives, optimizers, the unlearning loop, base training, finetuning, checkpoints."""
