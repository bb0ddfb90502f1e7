"""Benchmarks of PyTorch."""
