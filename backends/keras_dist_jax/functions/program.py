"""A compiled program: one function, for one structure of arguments."""

import dataclasses
import operator
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax import lax
from jax import numpy as jnp

from keras_dist.plugins import HOOKS
from keras_dist.plugins import TraceLog
from keras_dist.plugins import lend_global_seed
from keras_dist.plugins import noting_exchanges
from keras_dist.plugins import noting_variables
from keras_dist.plugins import refusing_variables
from keras_dist_jax.functions import structure
from keras_dist_jax.functions.cells import Cells
from keras_dist_jax.functions.cells import cells_in
from keras_dist_jax.functions.cells import run
from keras_dist_jax.functions.tracing import TAKEN
from keras_dist_jax.functions.tracing import AssignedInside
from keras_dist_jax.functions.tracing import Trace
from keras_dist_jax.functions.tracing import raise_explained
from keras_dist_jax.jax_internals import forget_effects
from keras_dist_jax.jax_internals import tracing_anew
from keras_dist_jax.machine import jit
from keras_dist_jax.placement import arrays
from keras_dist_jax.placement.arrays import ALONE
from keras_dist_jax.placement.arrays import COUNT
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.per_replica import UnevenError
from keras_dist_jax.programs.jaxprs import collectives
from keras_dist_jax.programs.jaxprs import has_callbacks
from keras_dist_jax.programs.jaxprs import has_cells_in_derivatives
from keras_dist_jax.throttle import Throttle
from keras_dist_jax.variables.bindings import LOCK
from keras_dist_jax.variables.bindings import Bindings
from keras_dist_jax.variables.bindings import VariableBinding
from keras_dist_jax.variables.storage import ALIASED

# References to an array that a variable and its binding have.
_OWN = 3
# The place among a program's results of what the throttle waits for.
_WITNESS_OF = operator.itemgetter(2)


class _GrownError(Exception):
    """A trace met variables that the program does not take or give."""


class NoRuleError(Exception):
    """JAX has no rule for what a function does with a variable."""


class Program:
    """A function that runs on the arrays of the variables that it uses."""

    def __init__(
        self,
        name: str,
        call: Callable[[Sequence[Any]], Any],
        bindings: Bindings,
        throttle: Throttle,
        layout: Layout | None,
        is_first: bool,
    ) -> None:
        self._name = name
        self._log = TraceLog(name)
        self._call = call
        self._bindings = bindings
        self._throttle = throttle
        self._is_first = is_first
        # The layout of programs on several devices, or `None`.
        several = layout is not None and layout.is_mesh
        self._storage_layout = None if layout is None else layout.devices[0]
        self._several = layout if several else None
        self.is_placed = layout is None or several
        # Variables that it takes: first those whose arrays it deletes, then
        # others that it writes, then those that it only reads.
        self._taken: list[VariableBinding] = []
        self._num_donated = self._num_written = 0
        self._written: set[int] = set()
        self._variables: dict[int, keras.Variable] = {}
        self._compiled: Any = None
        # Whether the program calls back to Python, which may raise.
        self._waits = False
        # What workers do together in it; empty if they don't meet. They compare
        # it before the first call of the function.
        self._meets = ""
        self._is_compared = not is_first
        # References to objects among the arguments.
        self.lives_with: list[Any] = []
        # Stands for the program at the throttle, which may outlive it.
        self._owner = object()
        # The outline of each trace's result. A compiled program returns a
        # tuple as long as its trace's index in this list.
        self._outlines: list[Any] = []
        self._inside = AssignedInside()
        self._has_no_rule = self._was_called = False
        # The trace that the next program is made of, or `None`.
        self._next: _Traced | None = None
        self.num_traces = 0

    @property
    def is_traced(self) -> bool:
        """`True` once the function was traced without an error."""
        return self._compiled is not None

    def run(self, leaves: list[Any]) -> Any:
        if self._has_no_rule:
            raise NoRuleError
        # Without the lock, two threads could donate the same arrays. The
        # throttle comes first: a step of `fit` that is traced behind it may
        # need the lock.
        if self._compiled is None:
            with self._throttle.lock, LOCK:
                if self._compiled is None:
                    self._adopt(self._trace(leaves))
        throttle, several, meets = self._throttle, self._several, ""
        if several is not None and several.is_global:
            meets = self._meets
            with throttle.lock, LOCK:
                self._agree(several, leaves)
            leaves = [*map(self._made_global, leaves)]
        if not throttle.waits:
            with LOCK:
                return self._dispatched(leaves)
        with throttle.lock, LOCK:
            throttle.drain(self._owner)
            if meets:
                throttle.record(meets)
            return self._dispatched(leaves)

    def _agree(self, several: Layout, leaves: list[Any]) -> None:
        """Compares what workers run together, if they meet in it."""
        if self._meets and not several.are_even(leaves):
            raise UnevenError
        if self._meets and not self._is_compared:
            several.compare_program(self._meets)
            self._is_compared = True

    def _dispatched(self, leaves: list[Any]) -> Any:
        is_moved = False
        while True:
            outputs: list[Any] = []
            others = _arrays_of(self._taken, self._num_donated)
            donated = others[: self._num_donated]
            del others[: self._num_donated]
            # In a first call, an interrupt may come after JAX has deleted them
            # and before it gives what takes their place.
            protect = not self._was_called and arrays.have_room(donated)
            if protect or max(map(COUNT, donated), default=0) > ALONE + _OWN:
                arrays.copy_shared(donated, _OWN, protect)
            try:
                self._throttle.dispatch(
                    self._owner,
                    outputs,
                    _WITNESS_OF,
                    self._compiled,
                    donated,
                    others,
                    leaves,
                )
                return self._keep(outputs[0])
            except _GrownError:
                continue
            except BaseException as error:
                if outputs and not self._waits:  # an interrupt
                    self._keep(outputs[0])
                elif outputs and isinstance(error, Exception):
                    # Raised here, and so no more by the next call.
                    self._throttle.enter(self._owner, None)
                    forget_effects()
                if "incompatible devices" in str(error) and not is_moved:
                    is_moved, leaves = True, [*map(self._here, leaves)]
                    continue
                if isinstance(error, Exception):
                    cause = self._throttle.explain(error)
                    if cause is not error:  # a worker is lost
                        raise cause from error
                raise_explained(error, self._name)

    def _here(self, leaf: object) -> Any:
        """Moves an argument from another device to those of the program."""
        if not isinstance(leaf, jax.Array) or len(leaf.devices()) > 1:
            return leaf
        if self._several is not None:
            return self._several.place(leaf)
        return (
            leaf
            if self._storage_layout is None
            else jax.device_put(leaf, self._storage_layout)
        )

    def _made_global(self, leaf: object) -> Any:
        """Converts an argument to an array over the devices of all workers."""
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            return leaf
        assert self._several is not None
        return self._several.to_global(self._several.place(leaf))

    def _keep(self, given: Any) -> Any:
        arrays, written, _, trace = given
        if self._several is not None and self._several.is_global:
            arrays = [*map(self._several.result, arrays)]
        if self._waits:
            jax.block_until_ready((arrays, written))
            jax.effects_barrier()
        self._was_called = True
        for binding, array in zip(self._taken, written, strict=False):
            if binding.is_direct and binding.key in binding.attributes:
                binding.attributes[binding.key] = binding.seen = (
                    binding.array
                ) = array
            else:
                binding.keep(array)
        return structure.unpacked(self._outlines[len(trace)], arrays)

    def _trace(
        self, leaves: list[Any], has_made_all: bool = False
    ) -> "_Traced":
        """Calls the function, to know what it computes with which variables."""
        if not has_made_all:
            self._log.note(leaves)
        self.num_traces += 1
        lend_global_seed()
        trace, outlines = Trace(self._inside), []
        self._inside.is_outdated = False

        def body(leaves: list[Any]) -> Any:
            with trace.entered():
                arrays, outline = structure.packed(self._call(leaves))
            outlines.append(outline)
            return arrays

        with noting_variables() as made:
            is_first = self._is_first and self._compiled is None
            name = None if is_first and not has_made_all else self._name
            try:
                with (
                    HOOKS,
                    tracing_anew(),
                    refusing_variables(name),
                    noting_exchanges() as new,
                ):
                    program = jax.make_jaxpr(body)(leaves)
            except Exception as error:
                raise_explained(error, self._name)
        # What it made variables for may be another way through its code.
        if made or self._inside.is_outdated:
            return self._trace(leaves, has_made_all=True)
        if has_cells_in_derivatives(program):
            self._has_no_rule = True
            raise NoRuleError
        described = collectives(program)
        if described:
            exchanges = ", ".join([*new, *described])
            self._meets = f"function `{self._name}`, with {exchanges}"
        cells = cells_in(program, TAKEN)
        return _Traced(_shapes(leaves), program, trace, cells, outlines[0])

    def _adopt(self, traced: "_Traced") -> None:
        """Makes the program take and give the variables of a trace."""
        trace = traced.trace
        for variable in traced.cells.used.values():
            trace.has(variable)
        self._waits = self._waits or has_callbacks(traced.program)
        if trace.layout is not None and trace.throttle is not None:
            self._several, self._throttle = trace.layout, trace.throttle
            self.is_placed = True
        # Variables of a strategy lie on the devices that it runs on.
        self.is_placed = self.is_placed or any(
            "distribute_strategy" in vars(variable)
            for variable in trace.variables.values()
        )
        self._written |= traced.cells.written.keys()
        self._variables |= traced.cells.used
        bindings = [
            self._bindings.of(variable, self._several)
            for variable in self._variables.values()
        ]
        self._next = traced

        def rank(binding: VariableBinding) -> int:
            if binding.id not in self._written:
                return 2
            return 1 if self._waits or not binding.donates else 0

        self._taken = sorted(bindings, key=rank)
        ranks = [*map(rank, bindings)]
        self._num_donated = ranks.count(0)
        self._num_written = len(ranks) - ranks.count(2)

        self._was_called = False
        # JAX's caches may keep this function, and must not keep the program.
        program = weakref.ref(self)

        def body(
            donated: list[Any], others: list[Any], leaves: list[Any]
        ) -> Any:
            alive = program()
            assert alive is not None
            return alive._traced([*donated, *others], leaves)

        body.__name__ = body.__qualname__ = self._name
        self._compiled = jit(body, _named, gives=_unwritten, donate_argnums=0)

    def _traced(self, values: list[Any], leaves: list[Any]) -> Any:
        traced, self._next = self._next, None
        if traced is None or traced.shapes != _shapes(leaves):
            traced = self._trace(leaves)
        used, written = traced.cells
        if used.keys() - self._variables or written.keys() - self._written:
            self._adopt(traced)
            raise _GrownError
        begin = {
            binding.id: value
            for binding, value in zip(self._taken, values, strict=True)
        }
        arrays, last = run(traced.program, leaves, {TAKEN: begin})
        outline = traced.outline

        def new(binding: VariableBinding) -> Any:
            value = last[TAKEN][binding.id]
            if self._several is None:
                return value
            return lax.with_sharding_constraint(
                value, binding.sharding or self._several.replicated
            )

        self._outlines.append(outline)
        if self._several is not None and self._several.is_global:
            arrays = [
                lax.with_sharding_constraint(array, self._several.replicated)
                if mark is structure.ARRAY
                else array
                for array, mark in zip(
                    arrays, structure.marks_of(outline), strict=True
                )
            ]
        return (
            arrays,
            [new(binding) for binding in self._taken[: self._num_written]],
            # The throttle waits for it: there may be no other result, and
            # others may be deleted by a later program.
            jnp.zeros((), "int32") if self._throttle.waits else None,
            ((),) * (len(self._outlines) - 1),
        )


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A trace of a function, for arguments of one kind."""

    shapes: Any
    program: Any
    trace: Trace
    cells: Cells
    outline: Any


def _shapes(leaves: list[Any]) -> list[Any]:
    """Returns what a trace depends on, of arguments or their tracers."""
    return [
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
        for leaf in leaves
    ]


def _named(donated: object, others: object, leaves: object) -> dict[str, Any]:
    """Names the arguments of a program."""
    return {"variables": [donated, others], "batch": leaves}


def _unwritten(results: Any) -> Any:
    """Leaves out new values of variables: described ones are not kept."""
    arrays, _, witness, trace = results
    return arrays, [], witness, trace


def _arrays_of(bindings: list[VariableBinding], num_donated: int) -> list[Any]:
    """Returns the variables' arrays; the first `num_donated` are not lent."""
    values = []
    for index, binding in enumerate(bindings):
        attributes = binding.attributes
        if (
            binding.seen is not None
            and attributes.get(binding.key) is binding.seen
            and not (index < num_donated and ALIASED in attributes)
        ):
            values.append(binding.array)
        else:
            values.append(binding.refresh())
    return values
