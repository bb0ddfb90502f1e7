"""keras_dist on PyTorch."""

from keras_dist_torch.backend import TorchBackend
from keras_dist_torch.compiler import register_trees
from keras_dist_torch.keras_internals import keep_out_of_groups

__all__ = ["TorchBackend"]

register_trees()
keep_out_of_groups()
