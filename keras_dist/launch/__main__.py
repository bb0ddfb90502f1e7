"""`python -m keras_dist.launch` is `keras-dist run`."""

import sys

from keras_dist.cli.main import app

app(["run", *sys.argv[1:]], prog_name="keras-dist")
