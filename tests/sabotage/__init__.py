"""Breaks promises of keras_dist one at a time, to see that tests notice."""
