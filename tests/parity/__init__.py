"""The same training with plain Keras and under a strategy."""
