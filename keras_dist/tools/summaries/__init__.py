"""The data of `keras_dist.summary`, and its tables."""
