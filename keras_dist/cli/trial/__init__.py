"""The trials of `keras-dist test`, and their results."""
