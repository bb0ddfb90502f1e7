"""The one door to Keras' private names in this package.

| name | why |
|---|---|
| `keras.Variable._value` | the Parameter itself, whatever scope is open |
| `keras.src.utils.torch_utils.TorchModuleWrapper` | refused: its parameters |
| | are read past Keras' variables |
"""

import keras
import torch
from keras.src.utils.torch_utils import TorchModuleWrapper

__all__ = ["TorchModuleWrapper", "parameter_of"]


def parameter_of(variable: keras.Variable) -> torch.Tensor | None:
    """The tensor that a variable keeps, or `None` before it has one."""
    value: torch.Tensor | None = variable._value
    return value
