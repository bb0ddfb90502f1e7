"""The models, the devices and the loops that are measured."""

import contextlib
import itertools
import os
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_dist.errors import DeviceError
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.backend import set_virtual_devices

LEARNING_RATE = 1e-3
# The default of Keras' Adam, for optimizers that have another one.
EPSILON = 1e-7

NUM_BATCHES = 4

Batch = tuple[NDArray[Any], NDArray[Any]]
Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ModelSize:
    """A multilayer perceptron and the batch it is trained on."""

    name: str
    rows: int  # of a global batch
    widths: tuple[int, ...]  # features, hidden units, classes


MODELS = {
    size.name: size
    for size in (
        ModelSize("small", 64, (64, 32, 10)),
        ModelSize("medium", 256, (256, 1024, 1024, 10)),
    )
}


@dataclass(frozen=True)
class Setting:
    """A model on devices; every arm starts with its weights and batches."""

    size: ModelSize
    devices: tuple[str, ...]  # one of each replica

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def title(self) -> str:
        """The model's name and the number of replicas."""
        return f"{self.size.name}, N={self.num_replicas}"

    def weights(self) -> list[NDArray[np.float32]]:
        """Returns kernels of shape `(inputs, units)` and biases, in turns."""
        rng = np.random.default_rng(0)
        widths = self.size.widths
        weights = []
        for inputs, units in zip(widths[:-1], widths[1:], strict=True):
            kernel = rng.normal(0.0, inputs**-0.5, (inputs, units))
            weights += [kernel.astype("float32"), np.zeros(units, "float32")]
        return weights

    def batches(self, rows: int | None = None) -> list[Batch]:
        """Returns batches of float32 features and int32 classes."""
        # All have the same features and different classes, so that no model
        # can fit them: gradients that fade into denormal numbers would make
        # late steps slower than early ones.
        rng = np.random.default_rng(1)
        size = self.size
        x = rng.normal(size=(size.rows, size.widths[0])).astype("float32")
        return [
            (x[:rows], each[:rows])
            for each in rng.integers(
                0, size.widths[-1], (NUM_BATCHES, size.rows), "int32"
            )
        ]

    def rows_of(self, worker: int) -> list[Batch]:
        """Returns a worker's rows of all batches; a worker is one replica."""
        each = self.size.rows // self.num_replicas
        rows = slice(worker * each, (worker + 1) * each)
        return [(x[rows], y[rows]) for x, y in self.batches()]

    def model(self) -> keras.Model:
        """Returns a new Keras model with the setting's weights."""
        widths = self.size.widths
        model = keras.Sequential(
            [
                keras.Input(widths[:1]),
                *(keras.layers.Dense(n, "relu") for n in widths[1:-1]),
                keras.layers.Dense(widths[-1]),
            ]
        )
        model.set_weights(self.weights())
        return model

    def model_and_optimizer(self) -> tuple[keras.Model, Any]:
        """Returns a new model and its optimizer, both built."""
        model = self.model()
        optimizer = keras.optimizers.Adam(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def compiled(self) -> keras.Model:
        model = self.model()
        model.compile(
            keras.optimizers.Adam(LEARNING_RATE),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model


def row_losses(y: Any, logits: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(
        y, logits, from_logits=True
    )


def size_of(name: str) -> ModelSize:
    """Returns the model that has a name; refuses unknown names."""
    if name not in MODELS:
        raise ValueError(
            f"There is no model of that name. Received: {name!r}. Expected: "
            f"some of {', '.join(MODELS)}, separated by commas."
        )
    return MODELS[name]


def settings_of(
    sizes: Sequence[ModelSize], groups: Sequence[tuple[str, ...]]
) -> list[Setting]:
    """Returns all sizes on all groups; refuses batches without equal shares."""
    settings = [Setting(size, devices) for size in sizes for devices in groups]
    for setting in settings:
        rows = setting.size.rows
        if rows % setting.num_replicas:
            raise ValueError(
                f"The {rows} rows of '{setting.size.name}' can't be split "
                f"into equal shares. Received: N = {setting.num_replicas}. "
                f"Expected: a number that divides {rows}, such as 2 or 4."
            )
    return settings


def groups_of_devices(
    replicas: Sequence[int] | None, device_type: str
) -> list[tuple[str, ...]]:
    """Returns the devices of each number of replicas; `None` is all numbers."""
    on_cpu = device_type == "cpu"
    if replicas is None:
        count = os.cpu_count() if on_cpu else len(list_devices(device_type))
        most = max(1, count or 1)
        replicas = sorted({2**i for i in range(most.bit_length())} | {most})
    if on_cpu:
        set_virtual_devices(max(replicas))
    present = list_devices(device_type)
    if len(present) < max(replicas):
        raise DeviceError(
            "There are fewer devices than replicas. Received: "
            f"{max(replicas)} replicas on '{device_type}'. Expected: at most "
            f"{len(present)}, or --device cpu, which makes virtual devices."
        )
    return [tuple(present[:n]) for n in replicas]


class Loop(ABC):
    """A training loop whose model is built and whose batches are placed."""

    @abstractmethod
    def run(self, steps: int) -> float:
        """Trains from the first batch on, waits, and returns the last loss."""

    def close(self) -> None:
        """Ends what the loop has started; a second call does nothing."""


class StepLoop(Loop):
    """A loop that calls `step` with the parts of each batch."""

    runs_in: Scope = contextlib.nullcontext

    def __init__(
        self,
        step: Callable[..., Any],
        batches: Sequence[Any],
        place: Callable[[Any], Any] | None = None,
        runs_in: Scope = contextlib.nullcontext,
    ) -> None:
        self.step = step
        self.batches = batches
        self.runs_in = runs_in
        self._place = place

    def feed(self, steps: int) -> Iterable[Any]:
        batches = itertools.islice(itertools.cycle(self.batches), steps)
        return batches if self._place is None else map(self._place, batches)

    def run(self, steps: int) -> float:
        step, loss = self.step, None
        with self.runs_in():
            for batch in self.feed(steps):
                loss = step(*batch)
        return float(keras.ops.convert_to_numpy(loss))


class _BatchLoop(StepLoop):
    """A loop of `train_on_batch`."""

    def __init__(
        self,
        model: keras.Model,
        batches: Sequence[tuple[NDArray[Any], ...]],
        runs_in: Scope,
    ) -> None:
        # A strategy's `train_on_batch` does not keep its model alive.
        super().__init__(
            lambda *batch: model.train_on_batch(*batch),
            batches,
            runs_in=runs_in,
        )
        self._model = model

    def feed(self, steps: int) -> Iterable[Any]:
        for index, batch in enumerate(super().feed(steps), 1):
            if index == steps:
                # Else Keras 3.14 returns the mean loss of all calls.
                self._model.reset_metrics()
            yield batch


def batch_loop(
    setting: Setting,
    batches: Sequence[tuple[NDArray[Any], ...]],
    built_in: Scope = contextlib.nullcontext,
    runs_in: Scope = contextlib.nullcontext,
) -> StepLoop:
    """Returns a loop of `train_on_batch`, which is the step of `fit`."""
    with built_in():
        model = setting.compiled()
    return _BatchLoop(model, batches, runs_in)
