"""Values of replicas, combined by the methods of a strategy."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist.core import context
from keras_dist.core.nests import always
from keras_dist.core.nests import check_counts
from keras_dist.core.nests import map_nest
from keras_dist.core.nests import refuse_objects
from keras_dist.core.nests import regroup
from keras_dist.core.options import ValueContext
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import check_gather
from keras_dist.core.reduction import check_numbers
from keras_dist.core.reduction import combine
from keras_dist.core.reduction import is_zero
from keras_dist.core.reduction import parse_reduce_op
from keras_dist.core.reduction import reduce_axes
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.plugin.executor import Executor
from keras_dist.replica.on_read import SyncOnReadVariable
from keras_dist.replica.replica_context import refuse_sparse
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.replica.variables import CentralVariable


def reduce(
    strategy: StrategyBase,
    reduce_op: ReduceOp | str,
    value: object,
    axis: object,
) -> Any:
    """Implements `strategy.reduce`."""
    context.check_cross_replica(strategy, "reduce")
    op = parse_reduce_op(reduce_op)
    try:
        with (
            _calling(strategy, f"reduce with {op.name}", value, axis),
            _on_one_device(strategy),
        ):
            return map_nest(
                lambda leaf: _reduce(strategy, op, leaf, axis), value
            )
    except (TypeError, ValueError) as error:
        refuse_objects(value, "reduce", error)
        raise


def _calling(
    strategy: StrategyBase, what: str, value: object, axis: object
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which workers compare a call's arguments."""
    workers = strategy.executor.workers
    if workers is None:
        return contextlib.nullcontext()
    structure = map_nest(lambda leaf: "value", value)
    return workers.calling(f"{what}, axis={axis}, of {structure}")


def _on_one_device(
    strategy: StrategyBase,
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose default is the plan's device, if only one."""
    if not strategy.plan.is_one_device:
        return contextlib.nullcontext()
    return strategy.executor.creation_scope()


def _reduce(
    strategy: StrategyBase, op: ReduceOp, leaf: object, axis: object
) -> Any:
    executor, primary = strategy.executor, strategy.plan.primary
    if axis is None and strategy.num_replicas_in_sync == 1:
        if isinstance(leaf, PerReplica):
            check_counts(leaf, 1)
            (leaf,) = leaf.values
        return plain(executor, leaf)
    if axis is None and strategy.cross_device_ops is None:
        combined = executor.combine_whole(op, leaf)
        if combined is not None:
            return combined
    values = to_combine(strategy, op, leaf)
    if axis is None:
        if not values:
            return plain(executor, leaf)
        return strategy.combine(op, values)
    if values is None:
        here = [executor.put(leaf, primary)]
        return reduce_axes(op, here, axis, combine)
    here = [executor.put(value, primary) for value in values]
    is_global = executor.workers is not None
    return reduce_axes(op, here, axis, strategy.combine, is_global)


def to_combine(
    strategy: StrategyBase, op: ReduceOp, leaf: object
) -> tuple[Any, ...] | None:
    """Returns components to combine, or `None` for a shared value."""
    values = _components(strategy, leaf)
    for value in values or ():
        check_numbers(value)
    if (
        values is None
        and op is not ReduceOp.MEAN
        and strategy.num_replicas_in_sync > 1
        and not is_zero(leaf)
    ):
        raise ValueError(
            f"A non-DistributedValues value {leaf!r} cannot be reduced "
            f"with the given reduce op {op}: it is one value, the same on "
            "each replica. Expected: a per-replica value, as "
            "`strategy.run` returns it."
        )
    return values


def gather(strategy: StrategyBase, value: object, axis: int) -> Any:
    """Implements `strategy.gather`."""
    context.check_cross_replica(strategy, "gather")
    try:
        with _calling(strategy, "gather", value, axis):
            return map_nest(lambda leaf: _gather(strategy, leaf, axis), value)
    except (TypeError, ValueError) as error:
        refuse_objects(value, "gather", error)
        raise


def _gather(strategy: StrategyBase, leaf: Any, axis: int) -> Any:
    executor = strategy.executor
    values = _components(strategy, leaf)
    if values is None:
        refuse_sparse(leaf, "gather")
        check_gather([np.empty(np.shape(leaf))], axis)
        return plain(executor, leaf)
    for value in values:
        refuse_sparse(value, "gather")
    here = [executor.put(value, strategy.plan.primary) for value in values]
    return executor.concatenate(here, check_gather(here, axis))


def _components(strategy: StrategyBase, leaf: object) -> tuple[Any, ...] | None:
    """Returns a leaf's components, or `None` for a value shared by all."""
    if isinstance(leaf, SyncOnReadVariable):
        return tuple(component.value for component in leaf.values)
    if isinstance(leaf, (keras.Variable, Mirrored)):
        return None
    check_counts(leaf, strategy.executor.num_components)
    if isinstance(leaf, DistributedValues):
        return leaf.values
    # With one replica a worker, values are not in a `PerReplica`.
    plan = strategy.plan
    is_only = plan.num_local_replicas == 1 < plan.num_workers
    return (leaf,) if is_only else None


def plain(executor: Executor, leaf: object) -> Any:
    """Returns the current value of a leaf that is equal on all replicas."""
    if isinstance(leaf, Mirrored):
        leaf = leaf.values[0]
    if isinstance(leaf, keras.Variable):
        leaf = leaf.value
    return executor.snapshot(leaf)


def local_results(strategy: StrategyBase, value: object) -> tuple[Any, ...]:
    """Implements `strategy.experimental_local_results`."""
    if isinstance(value, DistributedValues):
        return tuple(value.values)
    if not isinstance(value, (list, tuple, Mapping)):
        return (value,)

    def component(leaf: Any, index: int) -> Any:
        is_split = isinstance(leaf, DistributedValues)
        is_one = isinstance(leaf, CentralVariable)
        return leaf.values[index] if is_split and not is_one else leaf

    return tuple(
        map_nest(functools.partial(component, index=index), value)
        for index in range(strategy.plan.num_local_replicas)
    )


def values_from_function(
    strategy: StrategyBase, value_fn: Callable[[ValueContext], Any]
) -> Any:
    """Implements `strategy.experimental_distribute_values_from_function`."""
    context.check_cross_replica(
        strategy, "experimental_distribute_values_from_function"
    )
    plan, executor = strategy.plan, strategy.executor

    def context_of(i: int) -> ValueContext:
        return ValueContext(plan.first_replica + i, plan.num_replicas)

    def kept(leaf: Any) -> Any:
        # The user's function may overwrite an array.
        is_array = isinstance(leaf, np.ndarray)
        return leaf.copy() if is_array else executor.snapshot(leaf)

    with _on_one_device(strategy):
        values = [
            map_nest(kept, value_fn(context_of(i)))
            for i in range(plan.num_local_replicas)
        ]
    return regroup(values, executor.per_replica, always)
