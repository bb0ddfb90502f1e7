"""The measurement of `keras-dist bench`: `fit` under a strategy, and alone."""
