"""These tests look at PyTorch itself."""

import keras

collect_ignore_glob = [] if keras.backend.backend() == "torch" else ["*.py"]
