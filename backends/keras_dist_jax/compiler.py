"""Functions of variables, compiled: for one device, or all replicas."""

import inspect
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import jax

from keras_dist import context
from keras_dist.compilation import Compiler
from keras_dist.function import Function
from keras_dist.regroup import check_counts
from keras_dist.values import PerReplica
from keras_dist_jax.gate import Gate
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.layout import Layout
from keras_dist_jax.program import Program
from keras_dist_jax.regions import run_region
from keras_dist_jax.slots import Slots
from keras_dist_jax.structure import flatten
from keras_dist_jax.structure import unflatten
from keras_dist_jax.tracing import current_trace

if TYPE_CHECKING:
    from keras_dist.strategy_base import StrategyBase


class JaxCompiler(Compiler):
    """Compiles functions for a layout.

    Args:
        layout: The plan's devices, as JAX sees them; `None` to leave
            everything where it is.
        gate: Bounds the programs under way.
    """

    def __init__(self, layout: Layout | None, gate: Gate) -> None:
        self._layout = layout
        self._gate = gate
        self._slots = Slots(layout)
        self._several = layout is not None and len(layout.devices) > 1
        self._programs: weakref.WeakKeyDictionary[
            object, dict[Any, Program]
        ] = weakref.WeakKeyDictionary()

    @property
    def is_tracing(self) -> bool:
        return current_trace() is not None

    def call(
        self,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if function.jit_compile is False:
            return function.python_function(*args, **kwargs)
        mode = context.in_replica_function()
        return self._run(function, mode, None, args, kwargs)

    def run(
        self,
        strategy: "StrategyBase",
        fn: Function | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        python = fn.python_function if isinstance(fn, Function) else fn
        trace = current_trace()
        if trace is not None and self._several:
            assert self._layout is not None
            return run_region(
                strategy, self._layout, trace, python, args, kwargs or {}
            )
        if trace is not None or (
            isinstance(fn, Function) and fn.jit_compile is False
        ):
            return strategy.run_uncompiled(python, args, kwargs)
        context.check_cross_replica(strategy, "run")
        return self._run(fn, "run", strategy, args, kwargs or {})

    def _run(
        self,
        function: Function,
        mode: Any,
        strategy: "StrategyBase | None",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        leaves: list[Any] = []
        key = (
            mode,
            flatten(args, leaves, self._join, "args"),
            flatten(kwargs, leaves, self._join, "kwargs") if kwargs else None,
        )
        programs = self._programs.get(function.key)
        program = None if programs is None else programs.get(key)
        if program is None:
            program = self._add(function, strategy, key)
        if self._several or self._layout is None:
            return program.run(leaves)
        with self._layout.scope():
            return program.run(leaves)

    def _add(
        self, function: Function, strategy: "StrategyBase | None", key: Any
    ) -> Program:
        programs = self._programs.setdefault(function.key, {})
        python = _weakly(function.python_function)
        _, args_structure, kwargs_structure = key

        def call(leaves: Sequence[Any]) -> Any:
            rest = iter(leaves)
            args = unflatten(args_structure, rest, self._per_replica)
            kwargs = (
                unflatten(kwargs_structure, rest, self._per_replica)
                if kwargs_structure
                else {}
            )
            if strategy is None:
                return python()(*args, **kwargs)
            return self.run(strategy, python(), args, kwargs)

        program = programs[key] = Program(
            function.name, call, self._slots, self._gate, not programs
        )
        return program

    def _per_replica(self, joined: Any, stacked: bool) -> JoinedPerReplica:
        assert self._layout is not None
        return JoinedPerReplica(joined, stacked, self._layout)

    def _join(self, value: PerReplica) -> JoinedPerReplica:
        layout = self._layout
        if layout is None or len(value.values) != len(layout.devices):
            check_counts(value, 1 if layout is None else len(layout.devices))
        assert layout is not None
        if not isinstance(value, JoinedPerReplica):
            parts = [jax.numpy.asarray(part) for part in value.values]
            value = JoinedPerReplica(None, False, layout, parts)
        if not value.join():
            raise NotImplementedError("ragged")
        return value


def _weakly(python: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A reference that keeps neither a function alive nor its object."""
    found: Any
    try:
        found = (
            weakref.WeakMethod(python)
            if inspect.ismethod(python)
            else weakref.ref(python)
        )
    except TypeError:  # such as of a builtin
        return lambda: python
    return found
