"""Skips the steps of an epoch that were trained before a restart."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

_METHODS = ("on_train_batch_begin", "on_train_batch_end")
_ABSENT = object()


class Skipping:
    """A stand-in for a train function that skips the first steps.

    The data of these steps is read, and `callbacks` are not told of them.
    `then` is called once after the last of them, before any other data is read.
    It is given the last batch, or `None` if the trainer read it itself.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[Any],
        steps: int,
        then: Callable[[Any], None],
    ) -> None:
        self._model = model
        self._steps = self._left = steps
        self._then = then
        self._original = model.train_function
        self._before = [
            (callback, name, vars(callback).get(name, _ABSENT))
            for callback in callbacks
            for name in _METHODS
        ]
        model.train_function = self._train
        for callback, name, _ in self._before:
            setattr(callback, name, self._unless_skipped(callback, name))

    def end(self) -> None:
        """Restores the model and its callbacks; further calls do nothing."""
        for callback, name, before in self._before:
            if before is _ABSENT:
                delattr(callback, name)
            else:
                setattr(callback, name, before)
        self._before = []
        if self._model.train_function == self._train:
            self._model.train_function = self._original

    def _unless_skipped(self, callback: Any, name: str) -> Callable[..., None]:
        original = getattr(callback, name)

        def method(batch: int, logs: Any = None) -> None:
            if batch >= self._steps:
                original(batch, logs=logs)

        return method

    def _train(self, *args: Any) -> Any:
        """Stands in for the train function of any backend's trainer.

        The last argument is the data, either a batch or an iterator. The
        arguments before it are state that the function returns after its logs.
        """
        if self._left <= 0:
            self.end()
            return self._original(*args)
        executions = self._model.steps_per_execution
        self._left -= executions
        *state, data = args
        batch = None
        if hasattr(data, "__next__"):
            batch = _last_of(data, executions)
        if self._left <= 0:
            self._then(batch)
        return ({}, *state) if state else {}


def _last_of(data: Iterator[Any], executions: int) -> Any:
    """Reads the batches of an execution; the last of data may have fewer.

    Raises:
        StopIteration: If there is none, as for the trainer.
    """
    batch = next(data)
    for _ in range(executions - 1):
        batch = next(data, batch)
    return batch
