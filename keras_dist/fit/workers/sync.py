"""Several workers as one: the same values and decisions, one writer."""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.core.record import VariableRecord
from keras_dist.fit.plain_models import strategy_of
from keras_dist.fit.workers import drift
from keras_dist.fit.workers import same_data
from keras_dist.fit.workers.agreement import compare
from keras_dist.fit.workers.drift import comparable
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import KeepsShards
from keras_dist.plugin.workers import Workers

_UNKNOWN = -1  # in place of a hash
# What the names of files and folders begin with that are being written.
UNFINISHED = ".unfinished-"


def readable_by_chief(
    model: keras.Model,
) -> contextlib.AbstractContextManager[Any]:
    """Lets the chief alone read a model's variables inside the context."""
    return _by_chief(model, writes=False)


def written_by_chief(
    model: keras.Model,
) -> contextlib.AbstractContextManager[Any]:
    """Lets the chief alone assign a model's variables inside the context."""
    return _by_chief(model, writes=True)


def _by_chief(
    model: keras.Model, writes: bool
) -> contextlib.AbstractContextManager[Any]:
    """Serves the chief sharded variables; every worker enters the context."""
    executor = getattr(strategy_of(model), "executor", None)
    if not isinstance(executor, KeepsShards):
        return contextlib.nullcontext()
    variables = keras_saveables.all_variables(model)
    if writes:
        return executor.written_by_chief(variables)
    return executor.readable_by_chief(variables)


def not_taken(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns variables with values that have not been set to the chief's."""
    return [
        variable
        for variable in variables
        if VariableRecord.of(variable).number is None
        and keras_internals.has_value(variable)
    ]


def take_chiefs_values(
    variables: Sequence[keras.Variable], workers: Workers
) -> None:
    """Sets variables to the chief's values; all workers list them alike.

    Values in host memory are sent only if workers' codes of them differ.
    """
    chosen = comparable(variables)
    if not chosen:
        return
    values = [keras_internals.value_of(variable) for variable in chosen]
    code = _code_of(values)
    codes = check_alike(chosen, workers, code)
    for variable in chosen:
        record = VariableRecord.of(variable)
        if record.number is None:
            workers.num_taken += 1
            record.number = workers.num_taken
    if len(set(codes)) == 1 and codes[0] != _UNKNOWN:
        return
    values = workers.broadcast(values)
    for variable, value in zip(chosen, values, strict=True):
        if not workers.cluster.is_chief:
            keras.Variable.assign(variable, value)


def _code_of(values: Sequence[Any]) -> int:
    """Returns a hash of values, if it takes no copy to know it."""
    if get_backend().list_devices()[0].type != "cpu":
        return _UNKNOWN  # between accelerators, sending takes less time
    return drift.code_of(values)


class SyncCallback(keras.callbacks.Callback):
    """A callback that shares decisions of callbacks at both ends of an epoch.

    Without other callbacks, on any worker, that is at its end only. Between
    batches callbacks may run in threads, so workers don't communicate.
    """

    def __init__(
        self,
        workers: Workers,
        has_others: bool,
        order: Callable[[], list[int]] = lambda: [0] * 4,
    ) -> None:
        super().__init__()
        self._workers = workers
        self._has_others = has_others
        # Returns what tells the order of the rows that were read: four numbers.
        self._order = order

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if self._has_others:
            self._agree("the beginning of an epoch")

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._compare("the end of an epoch")

    def on_train_end(self, logs: object = None) -> None:
        if self._has_others:
            self._compare("the end of `fit`")

    def _compare(self, when: str) -> None:
        """Finds variables that have drifted apart."""
        code = drift.code_of_state(strategy_of(self.model), self.model)
        if len(set(self._agree(when, code))) > 1:
            variables = drift.state_of(self.model)
            drift.check_values(variables, self._workers, f"at {when}")

    def _agree(self, what: str, code: int = 0) -> list[int]:
        """Shares decisions; returns the codes of all workers."""
        model = self.model
        rates = learning_rates(model)
        local_rates = np.array(
            [np.float32(float(rate)) for rate in rates], "float32"
        )
        stops = int(model.stop_training)
        order = self._order()
        numbers = [stops, code, *order, *local_rates.view("int32").tolist()]
        sent = self._workers.concatenate_numbers(numbers, what)
        everyone = np.array(sent).reshape(-1, len(numbers))
        if everyone[:, 0].any():
            model.stop_training = True
        end = 2 + len(order)
        same_data.check_order(everyone[:, 2:end].tolist())
        chiefs = everyone[0, end:].astype("int32").view("float32")
        for rate, before, value in zip(rates, local_rates, chiefs, strict=True):
            if before != value:
                rate.assign(value)
        codes: list[int] = everyone[:, 1].tolist()
        return codes


def learning_rates(model: keras.Model) -> list[keras.Variable]:
    """Returns the learning rates of all optimizers that are variables."""
    optimizers = keras_saveables.all_optimizers(model).values()
    variables = (v for optimizer in optimizers for v in optimizer.variables)
    rates = (v for v in variables if v.name == "learning_rate")
    return keras_saveables.unique(rates)


def check_alike(
    variables: Sequence[keras.Variable], workers: Workers, number: int = 0
) -> list[int]:
    """Compares the variables of all workers; returns the number of each."""
    facts, paths = {}, {}
    for index, variable in enumerate(variables):
        name = f"variable {index}"
        taken = VariableRecord.of(variable).number
        known = "new" if taken is None else f"number {taken} of this process"
        shape = tuple(variable.shape)
        facts[name] = f"{variable.dtype} of shape {shape} ({known})"
        paths[name] = f" (here '{variable.path}')"
    what = "a comparison of variables"
    return [
        numbers[0] for numbers in compare(facts, workers, what, [number], paths)
    ]


@contextlib.contextmanager
def written_beside(path: str) -> Iterator[str]:
    """Yields the name of a file to write, which then replaces a local file.

    Killed processes and power failures leave the old file or the new one.
    """
    # A user's link stays, and what it leads to is replaced.
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    # Keras chooses the format by the suffix. The name is always the same, so
    # that a file that a killed process has left is overwritten.
    beside = os.path.join(folder, UNFINISHED + os.path.basename(path))
    try:
        yield beside
        _to_disk(beside)
        os.replace(beside, target)
        # Some network file systems can't do this for folders.
        with contextlib.suppress(OSError):
            _to_disk(folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


def _to_disk(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
