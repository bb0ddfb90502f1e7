"""Stacking and concatenating the results of several steps."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_dist.core.regroup import leaves_of
from keras_dist.core.regroup import map_nest
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.plugin.front_end import RunsReplicas


def snapshot(result: Any) -> Any:
    """Copies a step's result, so that later steps can't change it.

    On some frameworks a returned tensor shares a variable's memory.
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, (PerReplica, Mirrored)):
            return PerReplica([copy(value) for value in leaf.values])
        return ops.copy(leaf) if hasattr(leaf, "shape") else leaf

    return map_nest(copy, result)


def stack_steps(strategy: RunsReplicas, results: Sequence[Any]) -> Any:
    """Stacks what each step returned along a new first axis.

    Raises `ValueError` if structures or shapes differ.
    """
    return _joined(strategy, results, ops.stack)


def concatenate_steps(strategy: RunsReplicas, results: Sequence[Any]) -> Any:
    """Joins results of several steps each along their first axis.

    Raises `ValueError` if structures, or shapes beyond that axis, differ.
    """
    if len(results) == 1:
        return results[0]
    return _joined(strategy, results, ops.concatenate)


def _joined(
    strategy: RunsReplicas,
    results: Sequence[Any],
    join: Callable[[list[Any]], Any],
) -> Any:
    structures = [_structure(result) for result in results]
    if any(structure != structures[0] for structure in structures):
        raise ValueError(
            "The results of steps in one call are stacked, and so must have "
            f"one structure. Received: {structures}. Return the same "
            "lists, tuples and keys from each step."
        )
    columns = zip(*[leaves_of(result) for result in results], strict=True)
    joined = iter([_column(strategy, list(each), join) for each in columns])
    return map_nest(lambda leaf: next(joined), results[0])


def _column(
    strategy: RunsReplicas,
    leaves: list[Any],
    join: Callable[[list[Any]], Any],
) -> Any:
    if all(leaf is None for leaf in leaves):
        return None
    if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return _tensor(leaves, join)
    each = [strategy.experimental_local_results(leaf) for leaf in leaves]
    count = strategy.plan.num_local_replicas
    parts = [parts if len(parts) == count else parts * count for parts in each]
    return strategy.executor.per_replica(
        [_tensor(list(own), join) for own in zip(*parts, strict=True)]
    )


def _tensor(leaves: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    tensors = [ops.convert_to_tensor(leaf) for leaf in leaves]
    # Stacked results to concatenate may differ in their number of steps.
    start = 0 if join is ops.stack else 1
    shapes = {tuple(tensor.shape)[start:] for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(
            "The results of steps in one call are stacked, and so must have "
            f"one shape. Received: shapes {sorted(shapes)}. Return sums or "
            "means, or drop the last, partial batch."
        )
    return join(tensors)


def _structure(nest: Any) -> Any:
    if isinstance(nest, Mapping):
        return {key: _structure(nest[key]) for key in nest}
    if isinstance(nest, (list, tuple)):
        return [_structure(item) for item in nest]
    return None if nest is None else "value"
