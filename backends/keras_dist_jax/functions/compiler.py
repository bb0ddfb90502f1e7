"""Compilation of functions of variables, for one device or all replicas."""

import inspect
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from keras import ops

from keras_dist.plugins import CompiledFunction
from keras_dist.plugins import Compiler
from keras_dist.plugins import PerReplica
from keras_dist.plugins import RunsReplicas
from keras_dist.plugins import check_args
from keras_dist.plugins import check_arguments
from keras_dist.plugins import check_counts
from keras_dist.plugins import check_cross_replica
from keras_dist.plugins import in_replica_function
from keras_dist.plugins import leaves_of
from keras_dist.plugins import map_nest
from keras_dist.plugins import run_uncompiled
from keras_dist.plugins import stateless_scope
from keras_dist.plugins import tell
from keras_dist.plugins import values_are_replaced
from keras_dist_jax.functions.program import NoRuleError
from keras_dist_jax.functions.program import Program
from keras_dist_jax.functions.replica_program import run_on_all
from keras_dist_jax.functions.structure import ARRAY
from keras_dist_jax.functions.structure import IsTracedError
from keras_dist_jax.functions.structure import flatten
from keras_dist_jax.functions.structure import marks_of
from keras_dist_jax.functions.structure import objects_in
from keras_dist_jax.functions.structure import packed
from keras_dist_jax.functions.structure import unflatten
from keras_dist_jax.functions.structure import unpacked
from keras_dist_jax.functions.tracing import current
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.per_replica import JoinedPerReplica
from keras_dist_jax.placement.per_replica import UnevenError
from keras_dist_jax.sharding.sharded_steps import Sharding
from keras_dist_jax.throttle import Throttle
from keras_dist_jax.variables.bindings import Bindings


def scanned(
    call: Callable[[Any], Any],
    structure: object,
    leaves: Sequence[Any],
    steps: int,
) -> Any:
    """Calls a function for batch after batch; stacks the results."""
    # `leaves` are the traced arguments of all steps, one step after the other.
    count = len(leaves) // steps
    stacked = [jnp.stack(leaves[index::count]) for index in range(count)]
    outlines: list[Any] = []

    def step(_: None, leaves: Sequence[Any]) -> tuple[None, list[Any]]:
        result = call(unflatten(structure, iter(leaves)))
        arrays, outline = packed(result)
        outlines.append(outline)
        return None, arrays

    _, arrays = lax.scan(step, None, stacked)
    outline = outlines[-1]
    # The axis for replicas is in front of that for steps.
    return unpacked(
        outline,
        [
            array if mark is ARRAY else jnp.swapaxes(array, 0, 1)
            for array, mark in zip(arrays, marks_of(outline), strict=True)
        ],
    )


# Programs of one function, with which it is said that there are many.
_MANY = 6
_COMPILES_OFTEN = (
    f"has been compiled {_MANY} times, for other arguments that are no "
    "tensors, such as numbers. Each new value makes a new program. Pass what "
    "changes from call to call as an array."
)
_IS_UNEVEN = (
    "runs uncompiled where replicas have different numbers of rows, and gives "
    "the same numbers. For compiled steps only, choose batches that the "
    "replicas divide, and `drop_remainder=True`."
)
_HAS_NO_RULE = (
    "runs uncompiled, because it reads a variable in a function of "
    "`jax.custom_jvp` or `jax.lax.custom_root`, and JAX has no rule for that. "
    "Read the variable outside, and pass its value as an argument."
)
# Results of a scan that are stacked.
_STACKED = (jax.Array, jax.ShapeDtypeStruct, PerReplica)


class JaxCompiler(Compiler):
    """A compiler of functions for a layout."""

    # Of an executor that keeps sharded variables.
    sharding: Sharding | None = None

    def __init__(self, layout: Layout | None, throttle: Throttle) -> None:
        self._layout = layout
        self._throttle = throttle
        self._bindings = Bindings()
        self._several = layout is not None and layout.is_mesh
        # Whether workers have to tell each other the shapes of arguments.
        self.agrees = layout is not None and layout.is_global
        # Keys of functions of which it was said that they run uncompiled.
        self._reported: weakref.WeakSet[object] = weakref.WeakSet()
        self._programs: weakref.WeakKeyDictionary[
            object, dict[Any, Program]
        ] = weakref.WeakKeyDictionary()
        # The programs of the function that was called last.
        self._last: tuple[Any, dict[Any, Program]] = (lambda: None), {}

    @property
    def is_tracing(self) -> bool:
        return current.trace is not None

    def call(
        self,
        function: CompiledFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if function.jit_compile is False:
            return function.python_function(*args, **kwargs)
        mode = in_replica_function()
        try:
            return self._run(function, mode, None, args, kwargs)
        except IsTracedError:  # in a transformation of the user's own
            pass
        except UnevenError:
            self._tell(function, _IS_UNEVEN)
        except NoRuleError:
            self._tell(function, _HAS_NO_RULE)
        return function.python_function(*args, **kwargs)

    def run(
        self,
        strategy: RunsReplicas,
        fn: CompiledFunction | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        trace = current.trace
        if (
            trace is None
            and isinstance(fn, CompiledFunction)
            and fn.jit_compile is not False
            # With several replicas, `strategy.run` has checked for a scope.
            and (
                self._several
                or stateless_scope() is None
                or not values_are_replaced()
            )
        ):
            check_cross_replica(strategy, "run")
            if type(args) is not tuple and type(args) is not list:
                check_args(args)
            try:
                return self._run(fn, "run", strategy, args, kwargs)
            except IsTracedError:  # as in `call`
                pass
            except UnevenError:
                self._tell(fn, _IS_UNEVEN)
            except NoRuleError:
                self._tell(fn, _HAS_NO_RULE)
        python = fn.python_function if isinstance(fn, CompiledFunction) else fn
        if trace is None or not self._several:
            return run_uncompiled(strategy, python, args, kwargs)
        assert self._layout is not None
        trace.use(self._layout, self._throttle)
        return run_on_all(
            strategy,
            self._layout,
            trace,
            python,
            args,
            kwargs or {},
            self.sharding,
        )

    def scan(
        self,
        strategy: RunsReplicas,
        function: CompiledFunction,
        batches: Sequence[tuple[Any, ...]],
    ) -> Any:
        check_cross_replica(strategy, "run")
        step_leaves: list[list[Any]] = [[] for _ in batches]
        try:
            if self.agrees:
                self._agree(tuple(batches))
            structures = [
                flatten(batch, leaves, self._join)
                for batch, leaves in zip(batches, step_leaves, strict=True)
            ]
        # In a transformation of the user's own, or each step for itself.
        except (IsTracedError, UnevenError):
            return super().scan(strategy, function, batches)
        # One program runs steps of one structure only, along their arrays.
        if (
            len(batches) == 1
            or not step_leaves[0]
            or function.jit_compile is False
            or values_are_replaced()
            or any(structure != structures[0] for structure in structures)
        ):
            return super().scan(strategy, function, batches)
        mode = "scan", len(batches)
        leaves = [leaf for group in step_leaves for leaf in group]
        steps = structures[0], leaves
        try:
            result = self._run(
                function, mode, strategy, batches[0], None, steps
            )
        except (UnevenError, NoRuleError):
            return super().scan(strategy, function, batches)

        def stack(leaf: object) -> Any:
            if leaf is None or isinstance(leaf, _STACKED):
                return leaf
            return ops.stack([ops.convert_to_tensor(leaf)] * len(batches))

        return map_nest(stack, result)

    def _run(
        self,
        function: CompiledFunction,
        mode: object,
        strategy: RunsReplicas | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        steps: tuple[Any, list[Any]] | None = None,
    ) -> Any:
        """Runs a function's program for these arguments, compiled if needed."""
        # `steps` is the structure of the arguments, and the traced arguments of
        # all steps. It is one long function, because it runs at every step.
        if steps is None:
            leaves: list[Any] = []
            if self.agrees:
                self._agree((tuple(args), kwargs))
            key = (
                mode,
                flatten(args, leaves, self._join),
                flatten(kwargs, leaves, self._join) if kwargs else None,
            )
        else:
            key, leaves = (mode, steps[0], None), steps[1]
        last, programs = self._last
        if last() is not function.key:
            programs = self._programs.setdefault(function.key, {})
            self._last = weakref.ref(function.key, self._forget), programs
        try:
            program = programs.get(key)
        except TypeError as error:
            check_arguments(function, args, kwargs or {})
            raise TypeError(
                f"Arguments of the compiled function '{function.name}' are "
                "not tensors and can't be hashed. Expected: tensors or "
                "arrays, which are traced, or hashable values; the function "
                "is compiled again for each new value. To use another "
                "object, let the function close over it."
            ) from error
        if program is None:
            check_arguments(function, args, kwargs or {})
            program = self._made(
                function,
                strategy,
                key,
                not any(cached.is_traced for cached in [*programs.values()]),
            )
            _keep(program, programs, key)
            if len(programs) == _MANY:
                tell(function.name, _COMPILES_OFTEN)
        if program.is_placed:
            return program.run(leaves)
        assert self._layout is not None
        with self._layout.scope():
            return program.run(leaves)

    def _forget(self, _: object) -> None:
        self._last = (lambda: None), {}

    def _made(
        self,
        function: CompiledFunction,
        strategy: RunsReplicas | None,
        key: Any,
        is_first: bool,
    ) -> Program:
        python = _weakly(function.python_function)
        mode, args_structure, kwargs_structure = key

        def call(leaves: Sequence[Any]) -> Any:
            if strategy is not None and isinstance(mode, tuple):
                return scanned(
                    lambda args: self.run(strategy, python(), args, None),
                    args_structure,
                    leaves,
                    mode[1],
                )
            rest = iter(leaves)
            args = unflatten(args_structure, rest)
            kwargs = (
                unflatten(kwargs_structure, rest) if kwargs_structure else {}
            )
            if strategy is None:
                return python()(*args, **kwargs)
            return self.run(strategy, python(), args, kwargs)

        bindings, throttle, layout = (
            self._bindings,
            self._throttle,
            self._layout,
        )
        return Program(
            function.name, call, bindings, throttle, layout, is_first
        )

    def _tell(self, function: CompiledFunction, why: str) -> None:
        """Says once of a function that not all of its steps are compiled."""
        if function.key in self._reported:
            return
        self._reported.add(function.key)
        tell(function.name, why)

    def _join(self, value: PerReplica) -> JoinedPerReplica:
        if not isinstance(value, JoinedPerReplica):
            layout = self._layout
            if layout is None:
                raise ValueError(
                    "A compiled function was called outside of any scope "
                    "with a per-replica value that was not made by a "
                    f"strategy. Received: {value!r}. Call the function under "
                    "`strategy.scope()`, or make the value with "
                    "`strategy.experimental_distribute_values_from_function`."
                )
            check_counts(value, len(layout.devices))
            parts = [jax.numpy.asarray(part) for part in value.values]
            joined = JoinedPerReplica(None, False, layout, parts)
        else:
            joined = value
        joined.join()
        return joined

    def _agree(self, nest: object) -> None:
        """Raises `UnevenError` if workers bring values of different shapes."""
        values = [
            leaf
            for leaf in leaves_of(nest)
            if isinstance(leaf, PerReplica)
            and getattr(leaf, "joined", None) is None
        ]
        first = next(iter(values), None)
        layout = self._layout or getattr(first, "layout", None)
        if layout is None or not layout.is_global or current.trace is not None:
            return
        if not layout.are_even(
            [part for value in values for part in value.values]
        ):
            raise UnevenError


def _keep(program: Program, programs: dict[Any, Program], key: object) -> None:
    """Keeps a program for as long as objects among its arguments live."""

    def drop(_: object) -> None:
        programs.pop(key, None)

    program.lives_with = [
        weakref.ref(argument, drop) for argument in objects_in(key)
    ]
    programs[key] = program


def _weakly(python: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Makes a reference that keeps neither a function alive nor its object."""
    reference: Any
    try:
        reference = (
            weakref.WeakMethod(python)
            if inspect.ismethod(python)
            else weakref.ref(python)
        )
    except TypeError:  # builtins, for example, have no weak references
        return lambda: python
    return lambda: reference()
