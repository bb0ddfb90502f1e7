"""Joins replicas' rows, means, sums and writes into those of one device."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
from keras import ops

from keras_dist.core import nests
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import RowShard
from keras_dist.core.rows import scaled
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals import keras_internals
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.plugin.workers import Workers

T = TypeVar("T")
Combine = Callable[[list[Any], list[RowShard]], Any]
# The values of the replicas here, and their shares.
Column = tuple[list[Any], Sequence[RowShard]]


def detached(value: object) -> list[Any]:
    """Returns the leaves of a nested value, without gradients."""
    return [_detached(leaf) for leaf in nests.leaves_of(value)]


def join(
    like: object, everyone: list[tuple[list[Any], RowShard]], combine: Combine
) -> Any:
    """Joins replicas' nested values: concatenates rows, combines scalars."""
    values = [leaves for leaves, _ in everyone]
    shares = [share for _, share in everyone]
    return nests.pack(like, join_leaves(values, shares, combine))


def join_leaves(
    values: Sequence[Sequence[Any]],
    shares: Sequence[RowShard],
    combine: Combine,
) -> list[Any]:
    """Joins leaves of replicas, as `join` does with nested values."""
    return [
        _join_leaf(list(parts), list(shares), combine)
        for parts in zip(*values, strict=True)
    ]


class RowCount:
    """A number of rows as a metric's sample weight, which replicas sum."""

    def __init__(self, rows: object) -> None:
        self.rows = rows


class Common:
    """A value that is the same on each replica of all workers."""

    def __init__(self, value: object) -> None:
        self.value = value


def mean_or_count(values: list[Any], shares: list[RowShard]) -> Any:
    """Returns the mean over rows, or the sum of `RowCount`s."""
    if isinstance(values[0], RowCount):
        return sum_over_replicas([value.rows for value in values], shares)
    return mean_over_rows(values, shares)


def mean_over_rows(values: list[Any], shares: list[RowShard]) -> Any:
    """Returns the mean weighted by rows; of no floats, the first value."""
    first = values[0]
    if not is_float(first) or all(value is first for value in values):
        return first
    # Computed on the device where the rendezvous' function runs.
    first = ops.convert_to_tensor(first)
    equal, total = None, scaled(shares[0].keep(first), shares[0].weight)
    for value, share in zip(values[1:], shares[1:], strict=True):
        value = ops.convert_to_tensor(value, dtype=first.dtype)
        same = value == first
        equal = same if equal is None else ops.logical_and(equal, same)
        total = total + scaled(share.keep(value), share.weight)
    return ops.where(equal, first, total)


def sum_over_rows(values: list[Any], shares: list[RowShard]) -> Any:
    """Returns the given replicas' part of the mean over all rows."""
    terms = []
    for value, share in zip(values, shares, strict=True):
        tensor = ops.convert_to_tensor(value)
        terms.append(scaled(share.keep(tensor), share.weight))
    return sum(terms[1:], terms[0])


def sum_over_replicas(values: list[Any], shares: list[RowShard]) -> Any:
    """Returns the sum of the values of replicas that have rows."""
    terms = [s.keep(value) for value, s in zip(values, shares, strict=True)]
    return sum(terms[1:], terms[0])


def _detached(value: object) -> Any:
    if not keras.ops.is_tensor(value):
        return value
    mask = keras_internals.get_mask(value)
    value = keras_internals.backend_core.stop_gradient(value)
    if mask is not None:
        keras_internals.set_mask(value, mask)
    return value


def _join_leaf(
    parts: list[Any], shares: list[RowShard], combine: Combine
) -> Any:
    first = parts[0]
    if is_row_shaped(first):
        masks = [keras_internals.get_mask(part) for part in parts]
        merged = concat_rows(parts, shares)
        if masks[0] is not None:
            keras_internals.set_mask(merged, concat_rows(masks, shares))
        return merged
    if first is None or isinstance(first, (str, bool, Common)):
        return first
    return combine(parts, shares)


def is_float(value: object) -> bool:
    """Returns whether a value is a float or a tensor of floats."""
    if isinstance(value, (int, float)):
        return isinstance(value, float)
    dtype = getattr(value, "dtype", None)
    return dtype is not None and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(dtype)
    )


def is_row_shaped(value: object) -> bool:
    """Returns whether a value is an array with at least one axis."""
    return len(getattr(value, "shape", ())) > 0


def check_other_axes(
    what: str, parts: Sequence[Any], executor: Executor
) -> Sequence[Any]:
    """Refuses parts that differ in size along an axis that is not the first.

    Returns the parts, for further use.
    """
    sizes = [tuple(part.shape[1:]) for part in parts]
    if None not in sizes[0] and len(set(sizes)) == 1:
        return parts
    error = ReplicaDivergenceError(
        f"Replicas gave {what} arrays with rows, whose sizes along another "
        f"axis depend on their number of rows.\nReceived: shapes "
        f"{[tuple(part.shape) for part in parts]}. Expected: arrays that can "
        "be concatenated. Values of pairs of rows need all rows: compute them "
        "in a `keras.losses.Loss` or in the `update_state` of a "
        "`keras.metrics.Metric`, which get the rows of all replicas, or from "
        "`keras_dist.get_replica_context().all_gather(x, axis=0)`."
    )
    if None in sizes[0]:
        if hasattr(parts[0], "row_lengths") or hasattr(parts[0], "indices"):
            return parts  # ragged, or sparse
        shapes = [ops.convert_to_tensor(ops.shape(x)[1:]) for x in parts]
        flags = [_differ(shapes[0], shape) for shape in shapes[1:]]
        return executor.refuse(flags, lambda _: error, parts)
    raise error


def concat_rows(parts: list[Any], shares: list[RowShard]) -> Any:
    """Concatenates replicas' rows in order, without replicas that have none."""
    kept = [
        share.trim(part)
        for part, share in zip(parts, shares, strict=True)
        if not (isinstance(share.rows, int) and share.rows == 0)
    ]
    if not kept:
        return parts[0][:0]
    return kept[0] if len(kept) == 1 else ops.concatenate(kept, axis=0)


# The leaves of the nest of a replica, or of a whole worker, and its rows.
Entry = tuple[list[Any], RowShard]


def with_other_workers(
    group: ReplicaGroup,
    local_entries: list[Entry],
    combine: Combine,
    alike: bool = False,
) -> list[Entry]:
    """Returns the entries of this worker's replicas and one of each other
    worker; `alike` joins this worker's too, so that results are the same."""
    workers = group.workers
    if workers is None:
        return local_entries
    index = workers.cluster.index
    leaves = _leaves_of_worker(group, local_entries, combine)
    both = [*leaves, *map(keras_internals.get_mask, leaves)]
    travelling = [i for i, leaf in enumerate(both) if _travels(leaf)]
    sent = [ops.convert_to_tensor(both[i]) for i in travelling]
    are_bool = [_is_bool(tensor) for tensor in sent]
    arrived = workers.gather_rows(
        [
            ops.cast(tensor, "uint8") if is_bool else tensor
            for tensor, is_bool in zip(sent, are_bool, strict=True)
        ],
        group.shares,
    )
    entries: list[Entry] = []
    for worker, tensors in enumerate(arrived):
        if worker == index and not alike:
            entries += local_entries
            continue
        theirs = list(both)
        for i, tensor, is_bool in zip(
            travelling, tensors, are_bool, strict=True
        ):
            theirs[i] = ops.cast(tensor, "bool") if is_bool else tensor
        entries.append(
            (_as_own(local_entries[0][0], theirs), group.shares[worker])
        )
    return entries


def adds_up(leaf: Any) -> bool:
    """Returns whether a leaf is a number that replicas sum, with weights, and
    that float32 has."""
    is_count = isinstance(leaf, RowCount)
    value = leaf.rows if is_count else leaf
    if value is None or isinstance(value, float):
        return True
    if not ops.is_tensor(value):
        return (
            is_count and isinstance(value, int) and not isinstance(value, bool)
        )
    dtype = keras.backend.standardize_dtype(value.dtype)
    fits = dtype in ("float16", "bfloat16", "float32")
    return not len(value.shape) and (fits or (is_count and "int" in dtype))


def terms_of(local_entries: Sequence[Entry]) -> list[Any]:
    """Returns this worker's terms of sums over all replicas, given replicas'
    leaves that add up; those that are `None` have none."""
    shares = [share for _, share in local_entries]
    return [
        _term(list(values), shares)
        for values in zip(*[leaves for leaves, _ in local_entries], strict=True)
        if values[0] is not None
    ]


def _term(values: list[Any], shares: list[RowShard]) -> Any:
    is_count = isinstance(values[0], RowCount)
    return (mean_or_count if is_count else sum_over_rows)(values, shares)


def as_sums(like: Sequence[Any], sums: Sequence[Any]) -> Entry:
    """Returns the leaves of one device, given the sums of `terms_of`."""
    rest = iter(sums)
    leaves = [None if leaf is None else next(rest) for leaf in like]
    return _as_own([*like], leaves), WHOLE


def _leaves_of_worker(
    group: ReplicaGroup, local_entries: list[Entry], combine: Combine
) -> list[Any]:
    """Joins the leaves of this worker's replicas; of `RowCount`s, the rows."""
    leaves, share = local_entries[0]
    # The rows of a lone replica are its worker's.
    if len(local_entries) > 1 or not (
        isinstance(share.rows, int) and share.rows
    ):
        assert group.workers is not None
        of_worker = group.shares[group.workers.cluster.index]
        leaves = join_leaves(
            [leaves for leaves, _ in local_entries],
            [_within(share, of_worker) for _, share in local_entries],
            combine,
        )
    return [x.rows if isinstance(x, RowCount) else x for x in leaves]


def _as_own(like: list[Any], both: list[Any]) -> list[Any]:
    """Returns leaves in the form of a replica's own, given leaves and masks."""
    leaves, masks = both[: len(like)], both[len(like) :]
    for leaf, mask in zip(leaves, masks, strict=False):
        if mask is not None:
            keras_internals.set_mask(leaf, mask)
    return [
        RowCount(leaf) if isinstance(template, RowCount) else leaf
        for template, leaf in zip(like, leaves, strict=True)
    ]


def _within(share: RowShard, worker: RowShard) -> RowShard:
    """Returns a replica's share of its worker's rows."""
    if isinstance(worker.rows, int):
        return RowShard(share.rows, max(worker.rows, 1))
    return RowShard(share.rows, ops.maximum(worker.rows, 1))


def _travels(leaf: object) -> bool:
    if isinstance(leaf, (bool, str)) or leaf is None:
        return False
    return isinstance(leaf, (int, float)) or hasattr(leaf, "shape")


def _is_bool(value: Any) -> bool:
    return bool(keras.backend.standardize_dtype(value.dtype) == "bool")


def means(given: Sequence[Column], workers: Workers | None) -> list[Any]:
    """Returns means over all rows, in at most one collective; of values that
    are no floats, the first replica's."""
    if workers is None:
        return [mean_over_rows(values, list(of)) for values, of in given]
    floats = [g for g in given if is_float(g[0][0])]
    parts = [sum_over_rows(values, list(shares)) for values, shares in floats]
    totals = iter(workers.sum(parts) if parts else [])
    return [
        next(totals) if is_float(values[0]) else values[0]
        for values, _ in given
    ]


def agreed(
    given: Sequence[Column],
    executor: Executor,
    error: Callable[[int], Exception],
) -> list[Any]:
    """Returns the values that all replicas with rows have, which are compared.

    Args:
        given: Sequence with the values of several things, of one shape each.
        executor: `Executor` of the strategy.
        error: Callable from the place of a thing to the exception.
    """
    if not given:
        return []
    results, differ = [], []
    for values, shares in given:
        tensors = [ops.convert_to_tensor(value) for value in values]
        first = tensors[-1]
        pairs = list(zip(tensors, shares, strict=True))
        for value, share in reversed(pairs):
            first = share.either(value, first)
        results.append(first)
        flags = [_differ(first, share.either(x, first)) for x, share in pairs]
        differ.append(sum(flags[1:], flags[0]))
    workers = executor.workers
    if workers is not None:
        chiefs = workers.broadcast(results)
        rows = sum(share.rows for share in given[0][1])
        here = RowShard(rows, 1)  # that of the worker
        differ = [
            flag + _differ(value, here.either(local_value, value))
            for flag, value, local_value in zip(
                differ, chiefs, results, strict=True
            )
        ]
        results, differ = chiefs, workers.sum(differ)
    # A graph must not use the values before: it may drop what only waits.
    return executor.refuse(differ, error, results)


def _differ(one: Any, other: Any) -> Any:
    """Returns 1.0 if tensors differ, floats by more than rounding, else 0.0."""
    same = ops.equal(one, other)
    if is_float(one):
        gap, size = ops.abs(one - other), ops.abs(one)
        size = ops.where(ops.isfinite(size), size, ops.zeros_like(size))
        near = gap <= 1e-4 * ops.max(size, initial=0)
        both = ops.logical_and(ops.isnan(one), ops.isnan(other))
        same = ops.logical_or(same, ops.logical_or(near, both))
    return ops.cast(ops.logical_not(ops.all(same)), "float32")
