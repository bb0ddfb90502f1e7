"""Feeds for workers that read different data."""

import enum
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import final

import keras
import numpy as np

from keras_dist.core.nests import map_nest
from keras_dist.core.rows import bounds
from keras_dist.core.rows import check_rows
from keras_dist.core.rows import shape_of
from keras_dist.core.rows import sliceable
from keras_dist.errors import WorkerLostError
from keras_dist.inputs.feeds import Feed
from keras_dist.inputs.feeds import cut
from keras_dist.inputs.feeds import empty
from keras_dist.inputs.feeds import rows_of
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import like
from keras_dist.inputs.sources.source import own_memory
from keras_dist.inputs.sources.tf_data import TensorFlowSource
from keras_dist.inputs.sources.tf_data import TooFewFilesError
from keras_dist.plugin.workers import Workers


@final
class ShardFeed(Feed):
    """A feed of a worker's own batches, which have the global size.

    Each batch is split as if over all workers, and this worker takes one part
    after another, each in a step. A smaller batch gives fewer steps rather
    than smaller ones. `parts` is the number of the worker's replicas.
    """

    def __init__(
        self, source: TensorFlowSource, num_workers: int, parts: int
    ) -> None:
        source.check_batched()
        self.restarts = source.restarts
        self._source = source
        self._num_workers = num_workers
        self._parts = parts

    def steps(self) -> Iterator[list[Any]]:
        # If sizes vary, a whole batch has the largest size so far.
        size = self._source.batch_size
        for batch in self._source.read():
            rows = check_rows(batch)
            size = max(size, rows)
            edges = bounds(size, self._num_workers)
            batch = map_nest(sliceable, batch)
            for start, stop in itertools.pairwise(edges):
                if start < min(stop, rows):
                    step = rows_of(batch, slice(start, stop))
                    yield cut(step, self._parts)

    @property
    def cardinality(self) -> int:
        return INFINITE if self._source.cardinality == INFINITE else UNKNOWN

    @property
    def spec(self) -> Any:
        def of_any_rows(leaf: Any) -> Any:
            if not shape_of(leaf):
                return leaf
            return like(leaf, (None, *shape_of(leaf)[1:]))

        return map_nest(of_any_rows, self._source.spec)


class _State(enum.IntFlag):
    """The flags that a worker sends to the others about a step."""

    HAS_DATA = 1
    LEAVES_OUT = 2
    FAILED = 4
    HAS_TOO_FEW_FILES = 8
    KNOWS_NO_EMPTY = 16


@final
class AgreedFeed(Feed):
    """A feed of a worker's own data, with the same number of steps on all.

    In each step every worker tells the others whether it has data, or an
    error. A worker at its end gets arrays with 0 rows until all are at their
    end. All workers have to create the feed and to take its steps.

    `everyone` returns the `Feed` of all workers' replicas, and `parts` is the
    number of a worker's replicas.
    """

    def __init__(
        self,
        own: Feed,
        workers: Workers,
        parts: int,
        everyone: Callable[[], Feed],
    ) -> None:
        self.restarts = own.restarts
        self._own = own
        self._workers = workers
        self._parts = parts
        self._everyone = everyone
        count = own.cardinality
        counts = workers.concatenate_numbers(
            [count if count < 2**31 else UNKNOWN]
        )
        self._cardinality = counts[0] if len(set(counts)) == 1 else UNKNOWN

    def steps(self) -> Iterator[list[Any]]:
        own = self._own.steps()
        at_end: tuple[list[Any] | None, _State] | None = None
        while True:
            try:
                step = next(own, None)
                # Computed once, because it may have to read data.
                at_end = at_end or self._at_end(step)
            except Exception as error:
                is_short = isinstance(error, TooFewFilesError)
                more = _State.HAS_TOO_FEW_FILES if is_short else _State(0)
                self._tell(_State.FAILED | more)
                raise
            nothing, state = at_end
            if step is not None:
                state |= _State.HAS_DATA
            if not self._goes_on(self._tell(state)):
                return
            if step is None:
                assert nothing is not None  # else `_goes_on` has raised
                step = nothing
            yield step
            if self._cardinality == INFINITE:
                # There is no end to agree on.
                yield from own
                return

    def _tell(self, state: _State) -> list[_State]:
        """Returns the states of all workers; raises if another one failed."""
        states = [
            _State(number)
            for number in self._workers.concatenate_numbers([int(state)])
        ]
        if state & _State.FAILED:
            return states
        if any(each & _State.HAS_TOO_FEW_FILES for each in states):
            raise TooFewFilesError(len(states))
        if any(each & _State.FAILED for each in states):
            raise WorkerLostError(
                "Reading data failed on "
                f"{self._names(states, _State.FAILED)}, so that this worker "
                "can't go on either. See what that worker printed, and start "
                "all workers again."
            )
        return states

    def _goes_on(self, states: list[_State]) -> bool:
        have_data = [bool(state & _State.HAS_DATA) for state in states]
        if not any(have_data):
            return False
        if not all(have_data):
            if any(state & _State.LEAVES_OUT for state in states):
                return False
            if any(state & _State.KNOWS_NO_EMPTY for state in states):
                raise ValueError(
                    "A worker has less data than another, and can't make "
                    "batches of no rows. Received: no element at all, or one "
                    "that can't be cut, on "
                    f"{self._names(states, _State.KNOWS_NO_EMPTY)}. Expected: "
                    "at least one element on each worker, or a "
                    "`tf.data.Dataset`, which knows its shapes; and dense "
                    "arrays."
                )
        return True

    def _names(self, states: list[_State], which: _State) -> str:
        addresses = self._workers.cluster.addresses
        return ", ".join(
            f"worker {index} ({addresses[index]})"
            for index, state in enumerate(states)
            if state & which
        )

    def _at_end(
        self, step: list[Any] | None
    ) -> tuple[list[Any] | None, _State]:
        """Returns this worker's parts and flags for steps after its last one.

        The parts have 0 rows, and are made from those of the first `step`, or
        from the spec if that is `None`. They are `None` if they can't be made.
        """
        leaves_out = self._own.leaves_out
        state = _State.LEAVES_OUT if leaves_out else _State(0)
        try:
            if step is None:
                part = map_nest(_of_no_rows, self._own.spec)
            else:
                # Copies: a view would keep the whole batch in memory.
                part = map_nest(own_memory, empty(step[0]))
        except (TypeError, ValueError):
            return None, state | _State.KNOWS_NO_EMPTY
        return [part] * self._parts, state

    @property
    def cardinality(self) -> int:
        return self._cardinality

    @property
    def spec(self) -> Any:
        return self._own.spec

    def keras_data(self) -> Any:
        return self._everyone().keras_data()


def _of_no_rows(leaf: Any) -> Any:
    """Returns an array with 0 rows for a `keras.KerasTensor`.

    Raises `ValueError` for a sparse or ragged one, or another object.
    """
    if leaf is None:
        return None
    if not isinstance(leaf, keras.KerasTensor) or leaf.sparse or leaf.ragged:
        raise ValueError(f"No array is known of {leaf!r}.")
    shape = [0, *(size or 0 for size in leaf.shape[1:])] if leaf.shape else []
    if leaf.dtype == "string":
        return np.zeros(shape, "S1")
    try:
        return np.zeros(shape, leaf.dtype)
    except TypeError:  # such as float8, which NumPy may not know
        return keras.ops.zeros(shape, leaf.dtype)
