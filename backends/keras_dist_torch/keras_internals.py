"""The door to Keras' private names; `TorchModuleWrapper` is refused."""

import keras
import torch

from keras_dist.internals.keras_internals import global_state
from keras_dist.internals.private_names import private

TorchModuleWrapper = private("keras.src.utils.torch_utils.TorchModuleWrapper")


def parameter_of(variable: keras.Variable) -> torch.Tensor | None:
    """Returns a variable's tensor, in any scope, or `None` before it."""
    return variable._value


def tensor_of(variable: keras.Variable) -> torch.Tensor:
    value = parameter_of(variable)
    assert value is not None
    return value


def forget_parameter(variable: keras.Variable) -> None:
    del vars(variable)["_value"]


def device_scope() -> str | None:
    """Returns the device of the open `keras.device`, `None` without one."""
    device: str | None = global_state.get_global_attribute("torch_device")
    return device
