"""Benchmarks of JAX."""
