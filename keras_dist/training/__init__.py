"""What touches Keras' models, optimizers, metrics and layers."""
