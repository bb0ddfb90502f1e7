"""An in-memory backend that records its calls and computes nothing."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.internals.keras_internals import value_of
from keras_dist.plugin.backend import Backend
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.storage import Storage


class MemoryExecutor(Executor):
    """An executor that records its calls and changes no model or value.

    Args:
        plan: The `Plan` that the executor is bound to.

    Attributes:
        placed: List of the variables that were placed, each once.
        bound: List of the models given to `bind`.
        recovered: List of the models given to `recover`.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.placed: list[keras.Variable] = []
        self.bound: list[keras.Model] = []
        self.recovered: list[keras.Model] = []

    def storage(self, variable: keras.Variable) -> Storage:
        return MemoryStorage(variable, self)

    def put(self, value: object, device: Device) -> Any:
        return value

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        self.bound.append(model)
        return {}

    def recover(self, model: keras.Model) -> None:
        self.recovered.append(model)


class MemoryStorage(Storage):
    """The storage of a variable that is left where Keras made it."""

    def __init__(
        self, variable: keras.Variable, executor: MemoryExecutor
    ) -> None:
        super().__init__(variable)
        self._executor = executor

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._executor.plan.variable_devices

    def place(self) -> None:
        placed = self._executor.placed
        if not any(self.variable is variable for variable in placed):
            placed.append(self.variable)

    def read(self, index: int) -> Any:
        return value_of(self.variable)


class MemoryBackend(Backend):
    """A backend with the devices that it is given.

    Args:
        devices: Sequence of `Device`s. Defaults to two GPUs and one CPU.

    Example:

    >>> from keras_dist.plugin.backend import override_backend
    >>> with override_backend(keras_dist.testing.MemoryBackend()):
    ...     keras_dist.MirroredStrategy()
    <MirroredStrategy on gpu:0, gpu:1>
    """

    def __init__(self, devices: Sequence[Device] | None = None) -> None:
        self.devices = tuple(
            devices or (Device("gpu", 0), Device("gpu", 1), Device("cpu", 0))
        )
        self.executors: list[MemoryExecutor] = []

    def list_devices(self) -> Sequence[Device]:
        return self.devices

    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        kept = tuple(d for d in self.devices if d.type != device_type)
        made = tuple(Device(device_type, i) for i in range(num_devices))
        self.devices = kept + made

    def executor(self, plan: Plan) -> MemoryExecutor:
        executor = MemoryExecutor(plan)
        self.executors.append(executor)
        return executor

    def central_executor(self, plan: Plan) -> MemoryExecutor:
        return self.executor(plan)
