"""scan_steps: runs several steps of a training loop in one call."""

import contextlib
import itertools
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.values import DistributedValues
from keras_dist.errors import UnsupportedModelError
from keras_dist.fit.workers import loops
from keras_dist.inputs.iterator import DistributedIterator
from keras_dist.plugin.compiler import concatenate_steps
from keras_dist.replica.function import Function
from keras_dist.replica.gradients import check_run_counts
from keras_dist.strategies.default import get_strategy

# Attribute of a train step with its `Function`: the two live equally long.
_KEPT = "_keras_dist_function"


def scan_steps(
    train_step: Callable[..., Any], iterator: Iterator[Any], steps: int
) -> Any:
    """Runs several steps in one call of compiled code.

    This saves the time that Python takes between the steps of a small model.
    The results equal those of `strategy.run` in a loop. For each number of
    steps, a loop of the framework is compiled. On PyTorch, it is a Python loop.

    Args:
        train_step: Callable, as for `strategy.run`. It is compiled unless it
            is a `keras_dist.function` already.
        iterator: Iterator of batches, such as `iter(distributed_dataset)`. A
            tuple holds the positional arguments of `train_step`; any other
            batch is its only argument. The strategy of the distributed
            dataset runs the steps. For other iterators, the current strategy
            does.
        steps: Integer, number of batches to take. At the end of the data, it
            takes fewer. Batches of other shapes, such as a partial last one,
            run in a separate call.

    Returns:
        Nest like the result of `train_step`. Each leaf, on each replica, has
        the steps stacked along a new first axis.

    Raises:
        StopIteration: If there is no batch left.
        ValueError: If `steps` is not a positive integer, or if steps return
            different structures or shapes.
        RuntimeError: If called in a replica function.

    Example:

    >>> total = keras.Variable(0.0)
    >>> def step(x):
    ...     total.assign_add(keras.ops.sum(x))
    ...     return total.value
    >>> batches = iter([np.ones(2, "float32")] * 3)
    >>> totals = keras_dist.scan_steps(step, batches, steps=2)
    >>> keras.ops.convert_to_numpy(totals)
    array([2., 4.], dtype=float32)
    """
    _check(train_step, steps)
    strategy: Any = get_strategy()
    if isinstance(iterator, DistributedIterator):
        strategy = iterator.strategy or strategy
    if strategy.num_replicas_in_sync > 1:
        check_run_counts(strategy)
    compiler = strategy.executor.compiler
    if compiler is None:
        raise UnsupportedModelError(
            "The backend can't compile functions. Received: "
            f"{train_step!r}. Call `strategy.run` in a loop, or choose "
            "another backend with KERAS_BACKEND."
        )
    batches = _taken(iterator, steps)
    compiled = _compiled(train_step)
    with loops.in_run(strategy.executor.workers, train_step):
        results = [
            compiler.scan(strategy, compiled, list(alike))
            for _, alike in itertools.groupby(batches, _signature)
        ]
    return concatenate_steps(strategy, results)


def _check(train_step: object, steps: object) -> None:
    if not callable(train_step):
        raise TypeError(
            "`scan_steps` runs a function. Received: "
            f"train_step={train_step!r} of type {type(train_step).__name__}. "
            "Expected: a callable, such as a `keras_dist.function`."
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(
            "`scan_steps` takes at least one batch. Received: "
            f"steps={steps!r}. Expected: a positive integer."
        )


def _taken(iterator: Iterator[Any], steps: int) -> list[tuple[Any, ...]]:
    batches = [next(iterator)]
    for _ in range(steps - 1):
        try:
            batches.append(next(iterator))
        except StopIteration:
            break
    return [
        batch if isinstance(batch, tuple) else (batch,) for batch in batches
    ]


def _compiled(train_step: Any) -> Function:
    if isinstance(train_step, Function):
        return train_step
    if isinstance(train_step, types.MethodType):
        method = _compiled(train_step.__func__)
        return method.__get__(train_step.__self__)
    kept: Function | None = getattr(train_step, _KEPT, None)
    # A wrapper may have copied the attribute of the function that it wraps.
    if kept is None or kept.python_function is not train_step:
        kept = Function(train_step)
        with contextlib.suppress(AttributeError):  # some objects take none
            setattr(train_step, _KEPT, kept)
    return kept


def _signature(nest: object) -> Any:
    structure = map_nest(lambda leaf: None, nest)
    return repr(structure), [_kind(leaf) for leaf in leaves_of(nest)]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues):
        return [_kind(value) for value in leaf.values]
    shape = getattr(leaf, "shape", None)
    if shape is None:
        return type(leaf)
    return tuple(shape), keras.backend.standardize_dtype(leaf.dtype)
