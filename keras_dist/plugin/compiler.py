"""Compiler: compiles functions for the plan of one executor."""

import inspect
import os
import sys
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_dist.core import nests
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.plugin.front_end import CallOfReplica
from keras_dist.plugin.front_end import CompiledFunction
from keras_dist.plugin.front_end import RunsReplicas


class Compiler(ABC):
    """A compiler of functions for the plan of one executor."""

    @abstractmethod
    def call(
        self,
        function: CompiledFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function, compiled, in the context that the caller is in."""

    @abstractmethod
    def run(
        self,
        strategy: RunsReplicas,
        fn: CompiledFunction | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Implements `strategy.run` of, or inside, a compiled function."""

    def call_in_replica(
        self,
        function: CompiledFunction,
        call: CallOfReplica,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a compiled function from a replica function that is not:
        replicas meet, and one call runs the function for all of them."""
        strategy: Any = call.strategy

        def run_together(everyone: list[Any]) -> Any:
            per_replica = strategy.executor.per_replica
            args, kwargs = nests.regroup(everyone, per_replica)
            return self.run(strategy, function, args, kwargs)

        what = f"the compiled function '{function.name}'"
        result = call.sync(what, run_together, (args, kwargs))
        return call.replica.components_of(result)

    def scan(
        self,
        strategy: RunsReplicas,
        function: CompiledFunction,
        batches: Sequence[tuple[Any, ...]],
    ) -> Any:
        """Runs a function for one batch after another; each leaf of its results
        is stacked along a new first axis."""
        results = [
            snapshot(self.run(strategy, function, batch, None))
            for batch in batches
        ]
        return stack_steps(strategy, results)

    @property
    def is_tracing(self) -> bool:
        """True while this compiler traces a function in this thread."""
        return False


def snapshot(result: object) -> Any:
    """Copies a step's result, which may share a variable's memory."""

    def copy(leaf: object) -> Any:
        if isinstance(leaf, (PerReplica, Mirrored)):
            return PerReplica([copy(value) for value in leaf.values])
        return ops.copy(leaf) if hasattr(leaf, "shape") else leaf

    return nests.map_nest(copy, result)


def stack_steps(strategy: RunsReplicas, results: Sequence[Any]) -> Any:
    """Stacks what each step returned along a new first axis."""
    return _joined(strategy, results, ops.stack)


def concatenate_steps(strategy: RunsReplicas, results: Sequence[Any]) -> Any:
    """Joins results of several steps each along their first axis."""
    if len(results) == 1:
        return results[0]
    return _joined(strategy, results, ops.concatenate)


def _joined(
    strategy: RunsReplicas,
    results: Sequence[Any],
    join: Callable[[list[Any]], Any],
) -> Any:
    return nests.joined(
        results, lambda leaves: _column(strategy, leaves, join), "step"
    )


def _column(
    strategy: RunsReplicas, leaves: list[Any], join: Callable[[list[Any]], Any]
) -> Any:
    absent = [leaf is None for leaf in leaves]
    if all(absent):
        return None
    if any(absent):
        raise ValueError(
            "Steps returned different structures. Received: `None` from some "
            "of them. Expected: a value from each step, or from none."
        )
    if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return _tensor(leaves, join)
    local_results = [
        strategy.experimental_local_results(leaf) for leaf in leaves
    ]
    count = strategy.plan.num_local_replicas
    parts = [
        parts if len(parts) == count else parts * count
        for parts in local_results
    ]
    return strategy.executor.per_replica(
        [_tensor(list(column), join) for column in zip(*parts, strict=True)]
    )


def _tensor(leaves: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    tensors = [ops.convert_to_tensor(leaf) for leaf in leaves]
    # Stacked results to concatenate may differ in their number of steps.
    start = 0 if join is ops.stack else 1
    shapes = {tuple(tensor.shape)[start:] for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(
            "The results of steps in one call are stacked, so they must have "
            f"the same shape. Received: shapes {sorted(shapes)}. Return sums "
            "or means, or drop the last, partial batch."
        )
    return join(tensors)


def check_arguments(
    function: CompiledFunction, args: object, kwargs: object
) -> None:
    """Refuses arguments that can't be traced or compared by a later call."""
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        return
    for leaf in nests.leaves_of((args, kwargs)):
        problem = None if hasattr(leaf, "shape") else _problem(leaf)
        if problem is not None:
            what, rest = problem
            raise TypeError(
                f"Argument {_name(function, args, kwargs, leaf)} of the "
                f"compiled function '{function.name}' {what}. Received: "
                f"{leaf!r} of type {type(leaf).__name__}{rest}"
            )


def _problem(leaf: object) -> tuple[str, str] | None:
    field = nests.hidden_field(leaf)
    if field is not None:
        return (
            (
                "is an object that contains values, and a later call would "
                "not notice that they changed"
            ),
            f", with a value in `{field}`. Expected: tensors and per-replica "
            "values in lists, tuples, dicts and named tuples. Pass the "
            "values, in a dict for instance, and make the object from them "
            "in the function.",
        )
    try:
        hash(leaf)
    except TypeError:
        return (
            "is not a tensor and can't be hashed",
            ". Expected: a tensor or array, which is traced, or a hashable "
            "value. The function is compiled again for each hashable value. "
            "Pass a tuple instead of a set, give the class a `__hash__`, or "
            "let the function close over the value.",
        )
    return None


def _name(function: CompiledFunction, args: Any, kwargs: Any, leaf: Any) -> str:
    try:
        bound = inspect.signature(function.python_function).bind(
            *args, **kwargs
        )
        named = bound.arguments
    except (TypeError, ValueError):  # the call itself will raise
        named = {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
    for name, value in named.items():
        if any(candidate is leaf for candidate in nests.leaves_of(value)):
            return f"`{name}`"
    return "of unknown name"


VARIABLE = "KERAS_DIST_EXPLAIN_TRACES"


class TraceLog:
    """Logs a function's traces on standard error, if `VARIABLE` is set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: str | None = None

    def note(self, leaves: Sequence[Any], why: str | None = None) -> None:
        """Logs a trace, and `why`, unless the arguments tell it."""
        if os.environ.get(VARIABLE, "0") in ("", "0"):
            return
        described = ", ".join(map(_described, leaves)) or "nothing"
        before, self._last = self._last, described
        if why is None and before is None:
            why = "its first call with this structure of arguments"
        elif why is None and before == described:
            why = (
                "another value of an argument that is not traced, or new "
                "variables"
            )
        elif why is None:
            why = f"arguments of other shapes or dtypes; before: {before}"
        tell(self._name, f"is traced for {described}: {why}")


def tell(name: str, what: str) -> None:
    """Logs what a function does, on standard error."""
    sys.stderr.write(f"keras_dist: '{name}' {what}\n")


def _described(leaf: Any) -> str:
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return f"{dtype}[{','.join(map(str, leaf.shape))}]"
