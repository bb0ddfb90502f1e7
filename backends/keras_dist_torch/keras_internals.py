"""The one door to Keras' private names in this package.

| name | why |
|---|---|
| `keras.Variable._value` | the Parameter itself, whatever scope is open; a |
| | property of variables that are kept in parts |
| `keras.Variable._direct_assign` | where those are written |
| `keras.src.utils.torch_utils.TorchModuleWrapper` | refused: its parameters |
| | are read past Keras' variables |
| `torch_device` in `keras.src.backend.common.global_state` | which |
| | `keras.device` is open |
"""

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.utils.torch_utils import TorchModuleWrapper

__all__ = [
    "TorchModuleWrapper",
    "device_scope",
    "forget_parameter",
    "parameter_of",
]


def parameter_of(variable: keras.Variable) -> torch.Tensor | None:
    """The tensor that a variable keeps, or `None` before it has one."""
    value: torch.Tensor | None = variable._value
    return value


def forget_parameter(variable: keras.Variable) -> None:
    """Frees the tensor that a variable keeps."""
    del vars(variable)["_value"]


def device_scope() -> str | None:
    """The device of the `keras.device` that is open, if one is."""
    device: str | None = global_state.get_global_attribute("torch_device")
    return device
