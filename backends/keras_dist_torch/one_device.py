"""The executor for one device, plain Keras, and the base of all executors."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import torch
from keras import ops

from keras_dist.plugins import Device
from keras_dist.plugins import Executor
from keras_dist.plugins import Plan
from keras_dist.plugins import Storage
from keras_dist.plugins import Workers
from keras_dist.plugins import inlines
from keras_dist.plugins import map_nest
from keras_dist_torch import prefetch
from keras_dist_torch.compiler import TorchCompiler
from keras_dist_torch.compiler import snapshot
from keras_dist_torch.compiler import value_now
from keras_dist_torch.keras_internals import device_scope
from keras_dist_torch.keras_internals import on_device
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.keras_internals import tensor_of


def torch_device(device: Device) -> torch.device:
    """Returns PyTorch's device; every virtual CPU device is its one CPU."""
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device.index)


def keras_device(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Makes Keras put tensors on a device."""
    return on_device(torch_device(device))


class TorchStorage(Storage):
    """The storage of a variable on one device: every replica reads it there."""

    def __init__(
        self, variable: keras.Variable, plan: Plan, parameter_device: Device
    ) -> None:
        super().__init__(variable)
        self._plan = plan
        self._device = parameter_device

    @property
    def devices(self) -> tuple[Device, ...]:
        parameter = parameter_of(self.variable)
        if parameter is None:
            return (self._device,)
        return tuple(
            device
            for device in self._plan.variable_devices
            if torch_device(device) == parameter.device
        )

    def place(self) -> None:
        parameter = parameter_of(self.variable)
        device = torch_device(self._device)
        if parameter is not None and parameter.device != device:
            # The Parameter stays the same object: torch modules know it.
            parameter.data = parameter.data.to(device)

    def read(self, index: int) -> torch.Tensor:
        device = torch_device(self._plan.devices[index])
        return tensor_of(self.variable).detach().to(device)


class TorchExecutor(Executor):
    """The executor of one device, and the base of all executors."""

    assigns_in_place = True

    def __init__(self, plan: Plan, workers: Workers | None = None) -> None:
        super().__init__(plan, workers)
        self.compiler = TorchCompiler()

    def creation_scope(self) -> Any:
        return keras_device(self.plan.primary)

    @contextlib.contextmanager
    def execution_scope(self) -> Iterator[None]:
        with keras_device(self.plan.primary), self._prefetch():
            yield

    def _prefetch(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the batches of `fit` are sent ahead."""
        return prefetch.to_gpu(torch_device(self.plan.primary), self)

    def default_device(self) -> str | None:
        return device_scope()

    def storage(self, variable: keras.Variable) -> Storage:
        return TorchStorage(variable, self.plan, self.plan.primary)

    def put(self, value: object, device: Device) -> torch.Tensor:
        target = torch_device(device)
        if isinstance(value, torch.Tensor):
            return prefetch.sent(value, target)
        with keras.device("cpu"):
            tensor: torch.Tensor = ops.convert_to_tensor(value)
        return prefetch.sent(tensor, target)

    def bring(self, value: object, index: int) -> Any:
        device = torch_device(self.plan.devices[index])
        if isinstance(value, torch.Tensor) and value.device != device:
            return value.to(device)
        return value

    def leave(self, nest: object) -> Any:
        # Compiled functions return tensors, never variables.
        return map_nest(value_now, nest) if inlines() else nest

    def snapshot(self, value: object, index: int = 0) -> Any:
        return snapshot(value)

    def is_live(self, value: object) -> bool:
        return isinstance(value, torch.nn.Parameter)

    def device_of(self, tensor: torch.Tensor) -> Device:
        if not isinstance(tensor, torch.Tensor):
            return self.plan.primary
        is_gpu = tensor.device.type == "cuda"
        return Device("gpu" if is_gpu else "cpu", tensor.device.index or 0)
