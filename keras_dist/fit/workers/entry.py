"""Checks that all workers call `fit`, `evaluate` or `predict` alike."""

import copy
import inspect
import itertools
import zlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from typing import Any

import keras

from keras_dist.fit.workers import fingerprint
from keras_dist.fit.workers import same_data
from keras_dist.fit.workers import sync
from keras_dist.fit.workers.agreement import Facts
from keras_dist.fit.workers.agreement import compare
from keras_dist.fit.workers.backup import Restore
from keras_dist.fit.workers.backup import Save
from keras_dist.fit.workers.callbacks import BACKUP
from keras_dist.fit.workers.callbacks import chiefs_guarded
from keras_dist.fit.workers.callbacks import flat_callbacks
from keras_dist.fit.workers.callbacks import is_everyones
from keras_dist.fit.workers.callbacks import quiet_callbacks
from keras_dist.fit.workers.iterators import iterators_adapted
from keras_dist.fit.workers.iterators import shuffles_noted
from keras_dist.inputs.own_rows.adapters import has_own_rows
from keras_dist.inputs.own_rows.adapters import own_rows_of
from keras_dist.inputs.own_rows.shares import VARIABLE
from keras_dist.inputs.own_rows.shares import Shares
from keras_dist.inputs.own_rows.shares import is_wanted
from keras_dist.internals.keras_data import JOINS_STEPS
from keras_dist.internals.keras_data import set_initial_epoch
from keras_dist.plugin import randomness
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import KeepsShards
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.workers import Workers

_ARGUMENTS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "steps",
    "validation_batch_size",
    "validation_freq",
    "validation_split",
    "validation_steps",
)
_DATA = ("x", "y", "sample_weight", "class_weight", "validation_data")


class Entry:
    """One call of `fit` or a relative, kept the same on all workers."""

    def __init__(
        self,
        name: str,
        model: keras.Model,
        executor: Executor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
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
        given = self._get("callbacks")
        self._is_list = isinstance(given, keras.callbacks.CallbackList)
        self._callbacks = flat_callbacks(
            given.callbacks if self._is_list else given
        )
        self._in_parts = isinstance(executor, KeepsShards)
        self._shares = Shares(executor)
        # The iterators over data of which this worker loads its own rows, and
        # what was seen of other data.
        self._iterators: list[Any] = []
        self._seen: list[same_data.SeenOrder] = []
        if not workers.cluster.is_chief:
            self._set("verbose", 0)
            self._callbacks = quiet_callbacks(self._callbacks, self._in_parts)

    def agree(self) -> None:
        """Compares the call and its data, and takes the chief's random states.

        That is one collective, unless workers differ.
        """
        data = _data(self._arguments())
        facts = described(self._name, self._arguments())
        for callback in self._callbacks:
            if isinstance(callback, BACKUP):
                name = f"save_freq of {type(callback).__name__}"
                facts[name] = str(callback.save_freq)
        state, backend = "", get_backend()
        if self._name == "fit":
            state = randomness.random_state(backend)
        changing = [c for c in self._callbacks if is_everyones(c)]
        facts |= _computed(self._name, self._model, changing)
        numbers = [randomness.code_of(state), int(bool(self._callbacks))]
        numbers += same_data.fingerprints(data, self._get("batch_size"))
        what = f"`{self._name}`, to compare arguments"
        everyone = compare(facts, self._workers, what, numbers)
        codes, have_callbacks, *seen = zip(*everyone, strict=True)
        vars(bound(self._model))["compared"] = fingerprint.stamp_of(self._model)
        if len(set(codes)) > 1:
            state = self._workers.chiefs_text(state)
            randomness.set_random_state(backend, state)
        if same_data.is_wanted():
            same_data.compare(
                data, list(zip(*seen, strict=True)), self._workers
            )
        if self._name == "fit":
            outside = fingerprint.variables_outside(self._model)
            vars(bound(self._model))["outside"] = outside
            self._join(any(have_callbacks))

    def run(self) -> Any:
        if self._is_list:
            self._set("callbacks", self._in_list())
        elif self._callbacks or self._get("callbacks"):
            self._set("callbacks", self._callbacks)
        data = _data(self._arguments()) if same_data.is_wanted() else {}
        watch = same_data.data_watched(data, self._executor, self._workers)
        guard: AbstractContextManager[None] = nullcontext()
        if self._workers.cluster.is_chief:
            guard = chiefs_guarded(self._callbacks, self._in_parts)
        try:
            adapted = iterators_adapted(self._model, self._load_own_rows)
            noted = shuffles_noted(self._note_shuffled)
            with guard, watch, adapted, noted:
                return self._method(*self._given.args, **self._given.kwargs)
        finally:
            saves = [c for c in self._callbacks if isinstance(c, Save)]
            for callback in saves:
                callback.close()
            if saves:
                # The next `fit` begins with the epoch of its own argument.
                set_initial_epoch(self._model, None)

    def _load_own_rows(self, iterator: Any) -> None:
        """Makes an iterator of the model load this worker's rows only."""
        why_all = why_all_in(self._model, self._executor)
        if why_all and has_own_rows(iterator.data_adapter):
            raise ValueError(
                "A dataset of `strategy.own_rows` has no rows of other "
                f"workers, and this model needs them: {why_all}. Expected: a "
                "dataset of whole batches, or a compiled model."
            )
        adapter = None
        if not why_all:
            make_leaf = self._executor.own_rows_of(self._model)
            assert make_leaf is not None
            adapter = own_rows_of(
                iterator.data_adapter,
                self._shares,
                make_leaf,
                compares=same_data.is_wanted(),
            )
        if adapter is not None:
            self._executor.read_from(iterator, adapter)
            self._iterators.append(iterator)
        elif same_data.is_wanted() and self._executor.shows_batches:
            seen, read = same_data.SeenOrder(), iterator._get_iterator
            iterator._get_iterator = lambda: seen.noted(read())
            self._seen.append(seen)

    def _order(self) -> list[int]:
        """Returns a checksum of the rows that were read so far.

        With it come the numbers of `SeenOrder`.
        """
        codes = []
        for iterator in self._iterators:
            order = iterator.data_adapter.order
            # How far a pass has been read ahead is another thing.
            if not (order.is_ahead and iterator.steps_per_epoch):
                codes.append(order.code)
        own = zlib.crc32(repr(codes).encode()) >> 1
        return [own, *same_data.SeenOrder.joined(self._seen)]

    def _note_shuffled(self, iterator: object) -> None:
        for callback in self._callbacks:
            if isinstance(callback, Restore):
                callback.note_shuffled(iterator)

    def _join(self, some_have_callbacks: bool) -> None:
        """Adds the callbacks that keep the workers together."""
        workers = self._workers
        last: list[Any] = [
            sync.SyncCallback(workers, some_have_callbacks, self._order)
        ]
        for index, callback in enumerate(self._callbacks):
            if isinstance(callback, BACKUP):
                restore = Restore(callback, workers)
                self._callbacks[index] = restore
                others = self._callbacks
                last.append(Save(callback, restore, others, get_backend()))
        self._callbacks = [*self._callbacks, *last]

    def _in_list(self) -> Any:
        given = self._get("callbacks")
        pairs = itertools.zip_longest(self._callbacks, given.callbacks)
        if all(callback is theirs for callback, theirs in pairs):
            return given
        result = copy.copy(given)
        for callback in self._callbacks:
            if not any(callback is known for known in given.callbacks):
                callback.set_model(self._model)
                callback.set_params(given.params)
        result.callbacks = self._callbacks
        return result

    def _arguments(self) -> dict[str, Any]:
        merged = dict(self._given.arguments)
        for parameter in self._parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                merged |= merged.pop(parameter.name, {})
        return merged

    def _get(self, name: str) -> Any:
        return self._arguments().get(name)

    def _set(self, name: str, value: object) -> None:
        if name in self._parameters:
            self._given.arguments[name] = value
            return
        for parameter in self._parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                more = self._given.arguments.get(parameter.name, {})
                self._given.arguments[parameter.name] = {**more, name: value}


def why_all_in(model: keras.Model, executor: Executor) -> str:
    """Returns why a model reads all rows, whatever its data is, or ""."""
    if not is_wanted():
        return f"{VARIABLE}=0"
    if executor.own_rows_of(model) is None:
        return "steps run operation by operation"
    if JOINS_STEPS and model.steps_per_execution > 1:
        return "Keras stacks the batches of an execution"
    return ""


def described(method: str, arguments: Mapping[str, Any]) -> Facts:
    """Returns what has to be equal on all workers, but for zero and `None`."""
    validation = arguments.get("validation_data")
    if isinstance(validation, (tuple, list)) and validation:
        validation = validation[0]
    shuffle = arguments.get("shuffle")
    # A string, or a boolean in any form; `None` stands for true.
    if not isinstance(shuffle, str):
        shuffle = shuffle is None or bool(shuffle)
    values = {
        "method": f"`{method}`",
        **{name: arguments.get(name) or None for name in _ARGUMENTS},
        "shuffle": shuffle,
        "rows of the data": rows_of(arguments.get("x")),
        "batches of the data": batches_of(arguments.get("x")),
        "rows of the validation data": rows_of(validation),
        "batches of the validation data": batches_of(validation),
        same_data.VARIABLE: same_data.is_wanted(),
        VARIABLE: is_wanted(),
    }
    return {k: str(v) for k, v in values.items() if v is not None}


def rows_of(data: object) -> int | None:
    """Returns the number of rows of arrays, `None` for a dataset of batches."""
    if same_data.is_read(data):
        return None
    shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(data)]
    return next((shape[0] for shape in shapes if shape), None)


def batches_of(data: object) -> int | None:
    """Returns the number of batches of a dataset that knows it."""
    if not same_data.is_read(data):
        return None
    for name in ("num_batches", "cardinality", "__len__"):
        try:
            attribute = getattr(data, name, None)
            number = attribute() if callable(attribute) else attribute
        except (TypeError, NotImplementedError):
            # A dataset may have the method without knowing its length.
            continue
        if number is not None:
            return int(number)
    return None


def _computed(
    name: str, model: keras.Model, callbacks: Sequence[Any] = ()
) -> Facts:
    """Describes what a call computes."""
    link: Any = bound(model)
    if link.compiled is None:  # before it belonged to a strategy
        link.compiled = fingerprint.of_compile(model)
    layers = fingerprint.stamp_of(model)
    # A large model takes a while, and `predict` may be called often.
    if name == "fit" or link.compared != layers:
        link.layers = fingerprint.of_layers(model)
    process_facts = fingerprint.of_process(callbacks)
    facts: Facts = process_facts | link.compiled | link.layers
    return facts


def check_batch(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    workers: Workers,
) -> None:
    """Compares what `train_on_batch` or a relative computes, and its data."""
    what = f"`{method.__name__}`, to compare models"
    compare(_computed(method.__name__, args[0]), workers, what)
    if same_data.is_wanted():
        given = inspect.signature(method).bind(*args, **kwargs).arguments
        data = _data({**given, **given.get("kwargs", {})})
        same_data.check_arrays(data, workers)


def _data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    data = {name: arguments.get(name) for name in _DATA}
    if isinstance(data["class_weight"], dict):
        data["class_weight"] = sorted(data["class_weight"].items())
    return data
