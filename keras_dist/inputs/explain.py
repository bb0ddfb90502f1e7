"""Implementation of `strategy.explain`: each replica's rows of a batch."""

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import keras
import numpy as np

from keras_dist.core.leaves import check_batched
from keras_dist.core.leaves import check_rows
from keras_dist.core.leaves import readable
from keras_dist.core.leaves import shape_of
from keras_dist.core.regroup import leaves_of
from keras_dist.core.regroup import map_nest
from keras_dist.core.regroup import select
from keras_dist.core.rows import ranges
from keras_dist.core.unequal_rows import text_of_unequal
from keras_dist.core.values import PerReplica
from keras_dist.inputs.dataset import DistributedDataset
from keras_dist.inputs.dataset import data_for_fit
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.explanation import Explanation
from keras_dist.inputs.explanation import ReplicaRows
from keras_dist.inputs.iterator import DistributedIterator
from keras_dist.inputs.sources.choice import source_of
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import kept_random_state

if TYPE_CHECKING:
    from keras_dist.replica.strategy_core import StrategyBase

_TAKEN = (
    "Iterators can be read once: this batch was taken out of it, and will not "
    "come again."
)
_WHOLE = "It is not cut: each replica computes all of its rows."


def explain_data(
    strategy: "StrategyBase", x: Any, more: Sequence[Any], batch_size: Any
) -> Explanation:
    """Implements `strategy.explain`; `more` is `y` and `sample_weight`."""
    arrays = keras.utils.pack_x_y_sample_weight(x, *more)
    if any(isinstance(leaf, PerReplica) for leaf in leaves_of(arrays)):
        _check_alone("a batch of per-replica values", (), batch_size)
        return _of_parts(strategy, arrays)
    if not leaves_of(arrays):
        raise _no_batch(x)
    is_alone = batch_size is None and all(each is None for each in more)
    if is_alone and _are_batches(x):
        return _of_parts(strategy, _first_of(distribute_dataset(strategy, x)))
    if _are_arrays(arrays):
        batch = map_nest(readable, arrays)
        if batch_size is not None:
            batch = _first_rows(batch, batch_size)
        return _of_batch(strategy, batch)
    _check_alone(f"data of type {type(x).__name__}", more, batch_size)
    if isinstance(x, DistributedIterator):
        return _of_parts(strategy, _peeked(x))
    if isinstance(x, DistributedDataset):
        return _of_parts(strategy, _first_of(x))
    if data_for_fit(strategy, x) is not x:
        # With the policy HINT, workers read different rows, which `fit` joins
        # to global batches before it splits them.
        count = _of_parts(
            strategy, _first_of(distribute_dataset(strategy, x))
        ).num_rows
        return _of_batch(strategy, np.zeros((count, 0)))
    source = source_of(x, "explain")
    with (
        kept_random_state(get_backend())
        if source.restarts
        else contextlib.nullcontext()
    ):
        first = source.peek()
    if not first:
        raise _no_batch(x)
    notes = [] if source.restarts else [_TAKEN]
    return _of_batch(strategy, first[0], notes)


def _are_arrays(nest: Any) -> bool:
    def is_array(leaf: Any) -> bool:
        array = readable(leaf)
        return isinstance(array, np.ndarray) or keras.ops.is_tensor(array)

    leaves = [leaf for leaf in leaves_of(nest) if leaf is not None]
    return bool(leaves) and all(map(is_array, leaves))


def _are_batches(x: Any) -> bool:
    """Returns true for a list of tuples, which are batches."""
    return (
        isinstance(x, list)
        and bool(x)
        and all(isinstance(element, tuple) for element in x)
    )


def _check_alone(what: str, more: Sequence[Any], batch_size: Any) -> None:
    if batch_size is not None or any(each is not None for each in more):
        raise ValueError(
            "`explain` takes `y`, `sample_weight` and `batch_size` with "
            f"arrays only. Received: {what}, and batch_size={batch_size}. "
            "Expected: the data alone; its batches have all of that."
        )


def _first_rows(arrays: Any, batch_size: int) -> Any:
    """Returns the first batch that `fit` makes of arrays, without shuffling."""
    check_rows(arrays)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(
            "`batch_size` must be an integer of at least 1. Received: "
            f"{batch_size!r}."
        )
    return map_nest(
        lambda leaf: None if leaf is None else leaf[:batch_size], arrays
    )


def _peeked(iterator: DistributedIterator) -> Any:
    optional = iterator.peek()
    if not optional.has_value():
        raise _no_batch(iterator)
    return optional.get_value()


def _first_of(dataset: DistributedDataset) -> Any:
    if not dataset.restarts:
        # Data that is read once has one iterator, which keeps the element.
        return _peeked(iter(dataset))
    with kept_random_state(get_backend()):
        return _peeked(iter(dataset))


def _no_batch(data: Any) -> ValueError:
    return ValueError(
        "There is no batch to explain. Received: data of type "
        f"{type(data).__name__} at its end. Expected: at least one batch."
    )


def _of_batch(
    strategy: "StrategyBase", batch: Any, notes: Sequence[str] = ()
) -> Explanation:
    """Explains how `fit` splits a global batch."""
    check_batched(batch)
    shares = strategy.executor.rows_in_fit(batch)
    lengths = [
        int(shape_of(leaf)[0] or 0)
        for leaf in leaves_of(batch)
        if shape_of(leaf)
    ]
    is_equal, total = len(set(lengths)) == 1, max(lengths)

    def shape_in(share: range) -> Callable[[Any], Any]:
        def shape(leaf: Any) -> Any:
            own = shape_of(leaf)
            if not own:
                return None if leaf is None else ()
            is_cut = is_equal or not share
            return (len(share) if is_cut else own[0], *own[1:])

        return shape

    shapes = [map_nest(shape_in(share), batch) for share in shares]
    notes = list(notes)
    if not is_equal:
        shares = [range(total if share else 0) for share in shares]
        notes.append(text_of_unequal(lengths, on_each=bool(shares[-1])))
    elif len(shares) > 1 and shares[-1] == range(total) != range(0):
        notes.append(_WHOLE)
    return _explanation(strategy, "fit", shares, shapes, total, notes)


def _of_parts(strategy: "StrategyBase", element: Any) -> Explanation:
    """Explains which rows of a distributed element `strategy.run` passes."""
    plan, workers = strategy.plan, strategy.executor.workers
    parts = [select(index, element) for index in range(plan.num_local_replicas)]
    counts = [_num_rows(part) for part in parts]
    if workers is not None:
        counts = workers.concatenate_numbers(counts)
    own: list[Any] = [map_nest(_shape, part) for part in parts]
    before, total = plan.first_replica, sum(counts)
    shapes = [None] * before + own
    shapes += [None] * (len(counts) - len(shapes))
    shares = ranges([0, *itertools.accumulate(counts)])
    notes = []
    if total:
        in_fit = strategy.executor.rows_in_fit(np.zeros((total, 0)))
        if in_fit != shares:
            sizes = ", ".join(str(len(share)) for share in in_fit)
            notes.append(f"`fit` gives the replicas {sizes} of these rows.")
    return _explanation(strategy, "run", shares, shapes, total, notes)


def _shape(leaf: Any) -> Any:
    return None if leaf is None else shape_of(leaf)


def _num_rows(part: Any) -> int:
    shapes = [shape_of(leaf) for leaf in leaves_of(part)]
    return int(next((shape[0] for shape in shapes if shape), 0) or 0)


def _explanation(
    strategy: "StrategyBase",
    reader: str,
    shares: Sequence[range],
    shapes: Sequence[Any],
    total: int,
    notes: Sequence[str],
) -> Explanation:
    plan = strategy.plan
    local = plan.num_local_replicas
    rows = []
    for index, (share, shape) in enumerate(zip(shares, shapes, strict=True)):
        own = index - plan.first_replica
        is_here = 0 <= own < local
        device = str(plan.devices[own]) if is_here else None
        rows.append(ReplicaRows(index // local, index, device, share, shape))
    title = repr(strategy).strip("<>")
    return Explanation(title, reader, tuple(rows), total, tuple(notes))
