"""The interface of a framework's own benchmarks, and how they are found.

A plugin registers a `Benchmarks` subclass under the entry-point group
`keras_dist.benchmarks`, with the name that `keras.backend.backend()` returns.
"""

from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import ClassVar

import keras

from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.tasks import Task
from keras_dist.core.device import Device
from keras_dist.errors import BackendNotFoundError
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.workers import Workers

ENTRY_POINT_GROUP = "keras_dist.benchmarks"


class NativeWorkers(ABC):
    """The framework's own distribution over the workers of a cluster.

    It is started beside ours: `workers` have joined each other. `text`
    describes the native loop, in a sentence for people.
    """

    text: ClassVar[str]

    def __init__(self, workers: Workers) -> None:
        self.worker = workers.cluster.index

    @abstractmethod
    def loop(self, setting: Setting) -> Loop:
        """Returns a loop as the framework's users write it, on each worker.

        It takes NumPy batches, and trains on this worker's rows of each. Its
        `run` returns the loss over these rows, or over all. The setting has one
        device of each worker.
        """

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        """Returns further loops by name, to find the cause of a difference."""
        return {}

    def collectives(self, loop: Loop, steps: int) -> int | None:
        """Returns the number of collectives in a number of steps of any loop.

        It is `None` if the framework doesn't tell.
        """
        return None

    def close(self) -> None:
        """Ends what the distribution has started, but for what we use too."""


class Benchmarks(ABC):
    """A framework's own training, to compare with, and what it counts.

    The texts describe its loops, its arms of `fit` and what it counts as
    memory, in a sentence or two for people.

    The optimizer is Keras' default Adam with `LEARNING_RATE`, the loss the
    mean over rows of the cross entropy of softmax; in `native_fits`, both are
    the task's.
    """

    loop_text: ClassVar[str]
    fits_text: ClassVar[str]
    # `None` if the framework can't tell what memory is held.
    live_bytes_text: ClassVar[str | None] = None
    # `None` if it has no distribution over workers.
    native_workers: ClassVar[type[NativeWorkers] | None] = None

    @abstractmethod
    def native_loop(self, setting: Setting) -> Loop:
        """Returns the loop as the framework's users write it by hand."""

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        """Returns further loops by name, to find the cause of a difference.

        An example is `"Keras"`, the framework's loop around a Keras model,
        where the native loop has no Keras model.
        """
        return {}

    @abstractmethod
    def native_fits(
        self, task: Task, devices: tuple[str, ...]
    ) -> Mapping[str, Callable[[], Loop]]:
        """Returns functions that make the framework's own loops, by name.

        The loops are fed with NumPy arrays, as `fit` is. Their `run` returns
        the mean loss of the steps, or the last one's. `devices` has one device
        for each replica.
        """

    def fit_collectives(
        self, loop: Loop, steps: int, num_replicas: int
    ) -> int | None:
        """Returns the number of collectives in a number of steps of any loop.

        It is `None` if the framework doesn't tell.
        """
        return None

    def live_bytes(self, model: keras.Model) -> Mapping[Device, int] | None:
        """Returns the bytes that this process holds on each device.

        Everything that is alive counts, whoever holds it. Devices that hold
        nothing may be left out. `model` tells the device of each variable, for
        frameworks that don't know virtual devices. It is `None` if the
        framework doesn't tell.
        """
        return None


def get_benchmarks(lack: str) -> Benchmarks:
    """Returns the benchmarks of the Keras backend in use.

    `lack` completes the error's sentence "The plugin ...", if there are none.

    Raises:
        BackendNotFoundError: If its plugin has none, or there is no plugin.
    """
    found = entry_points(group=ENTRY_POINT_GROUP, name=keras.backend.backend())
    if not found:
        raise lacking(lack)
    benchmarks: Benchmarks = next(iter(found)).load()()
    return benchmarks


def lacking(lack: str) -> BackendNotFoundError:
    """Returns the error that says what the plugin in use lacks."""
    return BackendNotFoundError(
        f"The plugin of the backend '{keras.backend.backend()}' {lack}. "
        f"Received: {get_backend()!r}. Expected: a `Benchmarks` that has it, "
        f"under the entry-point group '{ENTRY_POINT_GROUP}'. Choose another "
        "backend with --backend."
    )
