"""Keras' own test files, run as clients of keras_dist."""
