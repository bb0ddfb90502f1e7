"""keras_dist on TensorFlow."""

from keras_dist_tensorflow import trees
from keras_dist_tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]

trees.register()
