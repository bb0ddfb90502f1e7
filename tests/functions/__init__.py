"""Functions that are compiled, on each backend."""
