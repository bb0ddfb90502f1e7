"""Keras' models, optimizers, metrics and layers on replicas."""
