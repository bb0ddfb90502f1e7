"""`python -m keras_dist.launch` is `keras-dist run`."""

import os
import sys

os.execv(
    sys.executable,
    [sys.executable, "-m", "keras_dist.cli", "run", *sys.argv[1:]],
)
