"""The checks of one real GPU, and the command that runs them and reports.

`python -m gpu`, run in `tests/`, needs a source tree and PYTHONPATH only.
"""
