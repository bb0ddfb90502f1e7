"""The calls of a function on all replicas, not compiled as a whole."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_dist.core import context
from keras_dist.core.nests import check_counts
from keras_dist.core.nests import map_nest
from keras_dist.core.nests import regroup
from keras_dist.core.strategy_classes import check_args
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.internals import keras_random
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.front_end import RunsReplicas
from keras_dist.plugin.workers import raise_explained
from keras_dist.replica.call import run_on_one
from keras_dist.replica.call import run_on_replicas
from keras_dist.replica.strategy_core import StrategyBase


def run_uncompiled(
    strategy: RunsReplicas,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Implements `strategy.run` for a function that is not compiled whole."""
    assert isinstance(strategy, StrategyBase)
    context.check_cross_replica(strategy, "run")
    check_args(args)
    executor = strategy.executor
    arguments = tuple(args), dict(kwargs or {})
    check_counts(arguments, strategy.plan.num_local_replicas)
    executor.check_arguments(arguments)

    def on_replica(index: int) -> Any:
        def component(leaf: object) -> Any:
            if isinstance(leaf, (PerReplica, Mirrored)):
                return map_nest(bring, leaf.values[index])
            return bring(leaf)

        def bring(leaf: object) -> Any:
            return executor.bring(leaf, index)

        positional, named = map_nest(component, arguments)
        return executor.leave(fn(*positional, **named))

    results = _on_replicas(strategy, on_replica)
    return join_results(executor, results, executor.per_replica)


def _on_replicas(
    strategy: StrategyBase, on_replica: Callable[[int], Any]
) -> list[Any]:
    keras_random.lend_global_seed()
    executor = strategy.executor
    try:
        with executor.hooks:
            runner = executor.replicas
            if runner is None:
                return [run_on_one(strategy, on_replica)]
            return run_on_replicas(strategy, runner, on_replica)
    except Exception as error:
        raise_explained(error, executor.workers)
        raise


def join_results(
    executor: Executor,
    results: Sequence[Any],
    wrap: Callable[[Sequence[Any]], Any],
) -> Any:
    """Joins the replicas' results to one immutable nest, with `wrap`."""
    # A compiled function returns tensors, never variables or captures.
    wraps = _is_array if context.inlines() else executor.is_live
    return regroup(results, wrap, wraps, executor.snapshot)


def _is_array(leaf: object) -> bool:
    """Returns true for a leaf that is a tensor in a compiled function."""
    return ops.is_tensor(leaf) or isinstance(leaf, (np.ndarray, np.generic))
