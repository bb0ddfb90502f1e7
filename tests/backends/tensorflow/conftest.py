"""These tests look at TensorFlow itself."""

import keras

collect_ignore_glob = (
    [] if keras.backend.backend() == "tensorflow" else ["*.py"]
)
