"""Benchmarks beside the frameworks' own loops.

`python -m bench`, run in `tests/`, needs a source tree, Keras and a framework.
"""
