"""Loops of `fit`, and who can make those of the framework."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import keras

from keras_dist.bench.loops import Loop
from keras_dist.bench.tasks import Task
from keras_dist.plugin.virtual import list_devices

Scope = Callable[[], AbstractContextManager[Any]]


class ModelLoop(Loop):
    """A loop around a compiled Keras model.

    Args:
        model: `keras.Model`.
        step: Callable, the Python function that a step runs, or traces.
    """

    def __init__(
        self, model: keras.Model, step: Callable[..., Any] | None = None
    ) -> None:
        self.model = model
        code = getattr(step or type(model).train_step, "__code__", None)
        self.step_code: frozenset[CodeType] = frozenset({code} if code else ())


class FitLoop(ModelLoop):
    """Calls `fit` for one epoch of so many steps, on NumPy arrays.

    Args:
        task: `Task`.
        built_in: Callable, whose context manager the model is made in.
        runs_in: Callable, whose context manager `fit` is called in.
    """

    def __init__(
        self,
        task: Task,
        built_in: Scope = contextlib.nullcontext,
        runs_in: Scope = contextlib.nullcontext,
    ) -> None:
        with built_in():
            super().__init__(task.model())
        self._task = task
        self._runs_in = runs_in

    def run(self, steps: int) -> float:
        """See `Loop.run`; returns the mean over all steps, as `fit` has it."""
        x, y = self._task.data(steps)
        with self._runs_in():
            history = self.model.fit(
                x,
                y,
                batch_size=self._task.size.rows,
                shuffle=False,
                verbose=0,
            )
        return float(history.history["loss"][-1])


def on_device(name: str) -> AbstractContextManager[Any]:
    """What places a plain Keras model, where that is not there anyway."""
    if name == list_devices()[0]:
        return contextlib.nullcontext()
    scope: AbstractContextManager[Any] = keras.device(name)
    return scope


class BenchmarksFit(ABC):
    """A `Backend` that has a distribution of its own to compare `fit` with."""

    @property
    @abstractmethod
    def native_fits_text(self) -> str:
        """What the native arms are, in a sentence or two for people."""

    @abstractmethod
    def native_fits(
        self, task: Task, devices: tuple[str, ...]
    ) -> Mapping[str, Callable[[], Loop]]:
        """What makes the framework's own ways to train, by name.

        They are fed with NumPy arrays, as `fit` is. What `Loop.run` returns
        is the mean loss of the steps, or the last one's.

        Args:
            task: `Task`.
            devices: Tuple of device strings, one a replica.
        """

    def fit_collectives(
        self, loop: Loop, steps: int, num_replicas: int
    ) -> int | None:
        """How many collectives steps take, of whichever loop.

        Args:
            loop: `Loop` to run.
            steps: Integer.
            num_replicas: Integer, how many devices take part.

        Returns:
            Integer, or `None` where the framework doesn't tell.
        """
        return None
