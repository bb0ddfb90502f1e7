"""keras_dist on JAX."""

from keras_dist_jax import trees
from keras_dist_jax.backend import JaxBackend

__all__ = ["JaxBackend"]

trees.register()
