"""Benchmarks of `keras-dist bench`: our loops beside those of the framework."""
