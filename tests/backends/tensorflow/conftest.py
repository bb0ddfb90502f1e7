"""These tests look at TensorFlow itself."""

import pathlib
import sys

import keras

# Scripts that tests run in other processes are modules for them, too.
sys.path.append(str(pathlib.Path(__file__).parent))

collect_ignore_glob = (
    [] if keras.backend.backend() == "tensorflow" else ["*.py"]
)
