"""Benchmarks of each framework, the only modules here that import it."""
