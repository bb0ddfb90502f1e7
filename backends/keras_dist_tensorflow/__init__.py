"""keras_dist on TensorFlow."""

from keras_dist_tensorflow.backend import TensorFlowBackend
from keras_dist_tensorflow.traced import register_values

__all__ = ["TensorFlowBackend"]

register_values()
