"""Runs `keras-dist` for `python -m keras_dist_cli`."""

from keras_dist_cli.main import app

app(prog_name="keras-dist")
