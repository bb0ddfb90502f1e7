"""Distributed training of Keras models, optimizers, metrics and layers."""
