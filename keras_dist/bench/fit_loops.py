"""Loops of `fit`."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import keras

from keras_dist.bench.loops import Loop
from keras_dist.bench.tasks import Task
from keras_dist.plugin.backend import list_devices

Scope = Callable[[], AbstractContextManager[Any]]


class ModelLoop(Loop):
    """A loop around a compiled Keras model.

    `step` is the Python function that a step runs, or traces.
    """

    def __init__(
        self, model: keras.Model, step: Callable[..., Any] | None = None
    ) -> None:
        self.model = model
        code = getattr(step or type(model).train_step, "__code__", None)
        self.step_code: frozenset[CodeType] = frozenset({code} if code else ())


class FitLoop(ModelLoop):
    """A loop that calls `fit` for one epoch, on NumPy arrays.

    The model is made in the context manager of `built_in`, and `fit` is called
    in that of `runs_in`.
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
        """Trains; returns the mean loss over all steps, as `fit` reports it."""
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
    """Returns a context manager that places a plain Keras model on a device.

    On the first device, where models are by default, it does nothing.
    """
    if name == list_devices()[0]:
        return contextlib.nullcontext()
    scope: AbstractContextManager[Any] = keras.device(name)
    return scope
