"""The door to Keras' private names; `TorchModuleWrapper` is refused."""

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.keras_internals import global_state
from keras_dist.internals.overrides import as_hook
from keras_dist.internals.private_names import private
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.workers import is_alone_on_purpose

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


def keep_out_of_groups() -> None:
    """Keeps models of strategies out of Keras' own distribution.

    From Keras 3.16, it begins wherever a program has a default process group:
    it puts models into DistributedDataParallel, and sums metrics once more.
    Models that each worker trains alone on purpose are kept out too.
    """
    begin = "_initialize_ddp"
    if begin not in vars(Trainer):
        return
    parent: Any = Trainer.__mro__[1]
    _hook(begin, lambda model: None)
    _hook("get_metrics_result", parent.get_metrics_result)


def _hook(name: str, instead: Callable[[Any], Any]) -> None:
    """Makes a method of Keras' trainer another one for what is kept out."""

    @as_hook
    def hook(original: Any, self: Any, /) -> Any:
        is_kept_out = bound(self) is not None or is_alone_on_purpose()
        return (instead if is_kept_out else original)(self)

    setattr(Trainer, name, hook(getattr(Trainer, name)))
