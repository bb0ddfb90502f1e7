"""keras_dist on PyTorch."""

from keras_dist_torch.backend import TorchBackend

__all__ = ["TorchBackend"]
