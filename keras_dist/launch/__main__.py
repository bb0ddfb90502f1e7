"""Runs `keras-dist run` for `python -m keras_dist.launch`.

Importing this package has loaded Keras and its framework. The launcher needs
neither, so it starts afresh without them.
"""

import os
import sys

os.execv(
    sys.executable,
    [sys.executable, "-m", "keras_dist_cli", "run", *sys.argv[1:]],
)
