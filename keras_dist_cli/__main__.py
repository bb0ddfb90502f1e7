"""`python -m keras_dist_cli` is `keras-dist`."""

from keras_dist_cli.main import app

app(prog_name="keras-dist")
