"""A call of `fit`, `evaluate` or `predict` on several workers."""

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

import keras

from keras_dist.fit.workers.agreement import check_agreement
from keras_dist.fit.workers.agreement import described
from keras_dist.fit.workers.backup import Restore
from keras_dist.fit.workers.backup import Save
from keras_dist.fit.workers.chief import BACKUP
from keras_dist.fit.workers.chief import flat_callbacks
from keras_dist.fit.workers.chief import quiet_callbacks
from keras_dist.fit.workers.same_data import Watch
from keras_dist.fit.workers.same_data import check_arrays
from keras_dist.fit.workers.same_data import is_wanted
from keras_dist.fit.workers.together import Together
from keras_dist.internals.keras_internals import set_initial_epoch
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import chiefs_text
from keras_dist.plugin.randomness import code_of
from keras_dist.plugin.randomness import random_state
from keras_dist.plugin.randomness import set_random_state

if TYPE_CHECKING:
    from keras_dist.plugin.executor import Executor
    from keras_dist.plugin.workers import Workers

_BACKUP_FREQUENCY = "save_freq of BackupAndRestore (0 for 'epoch')"


_DATA = ("x", "y", "sample_weight", "class_weight", "validation_data")


class Entry:
    """One call of `fit` or a relative, kept the same on all workers.

    With `keeps_parts`, saving takes all workers.
    """

    def __init__(
        self,
        name: str,
        model: keras.Model,
        executor: "Executor",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeps_parts: bool = False,
    ) -> None:
        self._name = name
        self._model = model
        assert executor.workers is not None
        workers = executor.workers
        self._executor = executor
        self._workers = workers
        self._method = getattr(type(model), name)
        signature = inspect.signature(self._method)
        self._parameters = signature.parameters
        self._given = signature.bind(model, *args, **kwargs)
        self._is_list = isinstance(
            self._get("callbacks"), keras.callbacks.CallbackList
        )
        given = self._get("callbacks")
        self._callbacks = flat_callbacks(
            given.callbacks if self._is_list else given
        )
        if not workers.cluster.is_chief:
            self._set("verbose", 0)
            self._callbacks = quiet_callbacks(self._callbacks, keeps_parts)

    def agree(self) -> None:
        """Compares the call with those of other workers, before it begins.

        Global random states that differ become the chief's.

        Raises:
            ReplicaDivergenceError: If workers make another call, or make it
                with other data.
        """
        arguments = self._arguments()
        own = described(self._name, arguments)
        own[_BACKUP_FREQUENCY] = self._backup_frequency()
        state, backend = "", get_backend()
        if self._name == "fit":
            state = random_state(backend)
        if not check_agreement(own, self._workers, code_of(state)):
            set_random_state(backend, chiefs_text(state, self._workers))
        if is_wanted():
            rows = arguments.get("batch_size")
            check_arrays(_data(arguments), self._workers, rows)
        if self._name == "fit":
            self._join()

    def run(self) -> Any:
        """Makes the call."""
        if self._is_list:
            self._set("callbacks", self._in_list())
        elif self._callbacks or self._get("callbacks"):
            self._set("callbacks", self._callbacks)
        watch = contextlib.nullcontext() if not is_wanted() else self._watch()
        try:
            with watch:
                return self._method(*self._given.args, **self._given.kwargs)
        finally:
            saves = [c for c in self._callbacks if isinstance(c, Save)]
            for callback in saves:
                callback.close()
            if saves:
                # The next `fit` begins with the epoch of its own argument.
                set_initial_epoch(self._model, None)

    def _watch(self) -> Watch:
        data = _data(self._arguments())
        return Watch(data, self._executor, self._workers)

    def _join(self) -> None:
        """Adds the callbacks that keep the workers together."""
        workers = self._workers
        last: list[Any] = [Together(workers)]
        for index, callback in enumerate(self._callbacks):
            if isinstance(callback, BACKUP):
                restore = Restore(callback, workers)
                self._callbacks[index] = restore
                others = self._callbacks
                last.append(
                    Save(callback, restore, others, workers, get_backend())
                )
        self._callbacks = [*self._callbacks, *last]

    def _in_list(self) -> Any:
        given = self._get("callbacks")
        pairs = itertools.zip_longest(self._callbacks, given.callbacks)
        if all(own is theirs for own, theirs in pairs):
            return given
        result = copy.copy(given)
        for callback in self._callbacks:
            if not any(callback is known for known in given.callbacks):
                callback.set_model(self._model)
                callback.set_params(given.params)
        result.callbacks = self._callbacks
        return result

    def _backup_frequency(self) -> int:
        found = [c for c in self._callbacks if isinstance(c, BACKUP)]
        if not found:
            return -1
        frequency = found[0].save_freq
        return 0 if frequency == "epoch" else int(frequency)

    def _arguments(self) -> dict[str, Any]:
        merged = dict(self._given.arguments)
        for parameter in self._parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                merged |= merged.pop(parameter.name, {})
        return merged

    def _get(self, name: str) -> Any:
        return self._arguments().get(name)

    def _set(self, name: str, value: Any) -> None:
        if name in self._parameters:
            self._given.arguments[name] = value
            return
        for parameter in self._parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                more = self._given.arguments.get(parameter.name, {})
                self._given.arguments[parameter.name] = {**more, name: value}


def check_batch(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    workers: "Workers",
) -> None:
    """Compares the data that workers pass to `train_on_batch` or a relative.

    `method` is that of the model's class, and `args` begin with the model.

    Raises:
        ReplicaDivergenceError: If workers pass different data.
    """
    if is_wanted():
        given = inspect.signature(method).bind(*args, **kwargs).arguments
        check_arrays(_data({**given, **given.get("kwargs", {})}), workers)


def _data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments, by name, that have to be equal on every worker."""
    found = {name: arguments.get(name) for name in _DATA}
    if isinstance(found["class_weight"], dict):
        found["class_weight"] = sorted(found["class_weight"].items())
    return found
