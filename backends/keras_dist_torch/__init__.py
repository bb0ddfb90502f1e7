"""keras_dist on PyTorch."""

from keras_dist_torch.backend import TorchBackend
from keras_dist_torch.compiler import register_trees

__all__ = ["TorchBackend"]

register_trees()
