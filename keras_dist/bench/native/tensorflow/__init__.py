"""Benchmarks of TensorFlow."""
