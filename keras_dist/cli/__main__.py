"""Runs `keras-dist` for `python -m keras_dist.cli`."""

from keras_dist.cli.main import app

app(prog_name="keras-dist")
