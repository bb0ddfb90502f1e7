"""A compiled program: one function, for one structure of arguments."""

import contextlib
import sys
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax import lax
from jax import numpy as jnp

from keras_dist.core.context import refusing_variables
from keras_dist.internals.keras_internals import make_global_seed
from keras_dist.internals.keras_internals import opened
from keras_dist.plugin.compiler import TraceLog
from keras_dist.plugin.front_end import keras_hooks
from keras_dist_jax import arrays
from keras_dist_jax.control_flow import install_cond
from keras_dist_jax.control_flow import install_global_seed
from keras_dist_jax.gate import Gate
from keras_dist_jax.jaxprs import has_callbacks
from keras_dist_jax.layout import Layout
from keras_dist_jax.placement import LENT
from keras_dist_jax.slots import LOCK
from keras_dist_jax.slots import Slot
from keras_dist_jax.slots import Slots
from keras_dist_jax.structure import ARRAY
from keras_dist_jax.structure import marks_of
from keras_dist_jax.structure import packed
from keras_dist_jax.structure import unpacked
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import eagerly
from keras_dist_jax.tracing import raise_explained


class _GrownError(Exception):
    """A trace met variables that the program does not take or give."""


class Program:
    """A function that runs on the arrays of the variables that it uses.

    Args:
        name: String, its name in messages and profiles.
        call: Callable that calls the function, given the traced arguments.
        slots: The compiler's `Slots`.
        gate: Bounds the programs under way.
        layout: The `Layout`, or `None` without a strategy.
        is_first: Boolean, whether the function was never traced before.

    Attributes:
        is_placed: Whether its arguments decide which device it runs on.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Sequence[Any]], Any],
        slots: Slots,
        gate: Gate,
        layout: Layout | None,
        is_first: bool,
    ) -> None:
        self._name = name
        self._log = TraceLog(name)
        self._call = call
        self._slots = slots
        self._gate = gate
        self._is_first = is_first
        # The layout of programs on several devices, or `None`.
        several = layout is not None and layout.is_mesh
        self._home = None if layout is None else layout.devices[0]
        self._several = layout if several else None
        self.is_placed = layout is None or several
        # Written variables whose arrays programs delete; written variables
        # whose arrays they keep; these and those that are only read.
        self._donated: list[Slot] = []
        self._given: list[Slot] = []
        self._taken: list[Slot] = []
        self._cut = 0
        self._variables: dict[int, keras.Variable] = {}
        self._compiled: Any = None
        # Whether the program calls back to Python, which may raise.
        self._waits = False
        self._witness: Any = None
        # Stands for the program at the gate, which may outlive it.
        self._owner = object()
        # The outline of each trace's result. A compiled program returns a
        # tuple as long as its trace's index in this list.
        self._outlines: list[Any] = []
        self.num_traces = 0
        self.num_calls = 0

    @property
    def is_traced(self) -> bool:
        """`True` once the function was traced without an error."""
        return self._compiled is not None

    def run(self, leaves: list[Any]) -> Any:
        """Calls the function with the traced arguments.

        Returns:
            The function's result, with arrays for tensors.

        Raises:
            TraceError: If the function can't be compiled.
        """
        gate = self._gate
        # Without the lock, two threads could donate the same arrays.
        with LOCK:
            if self._compiled is None:
                self._survey(leaves)
                gate = self._gate
            if self._several is not None and self._several.is_wide:
                leaves = [*map(self._widened, leaves)]
            if not gate.waits:
                return self._dispatched(leaves)
            with gate.lock:
                gate.settle(self._owner)
                result = self._dispatched(leaves)
                gate.enter(self._owner, self._witness)
            return result

    def _dispatched(self, leaves: list[Any]) -> Any:
        is_moved = False
        while True:
            held: list[Any] = []
            found = _arrays_of(self._taken, self._cut)
            donated, others = found[: self._cut], found[self._cut :]
            del found
            protect = not self.num_calls
            if protect or max(map(_COUNT, donated), default=0) > _ALONE:
                donated = _unshared(donated, protect)
            try:
                # `extend` runs in C, so that no interrupt comes after a program
                # has deleted its inputs and before its results are kept.
                held.extend(
                    map(self._compiled, (donated,), (others,), (leaves,))
                )
                return self._keep(held[0])
            except _GrownError:
                continue
            except BaseException as error:
                if held and not self._waits:  # an interrupt
                    self._keep(held[0])
                if "incompatible devices" in str(error) and not is_moved:
                    is_moved, leaves = True, [*map(self._here, leaves)]
                    continue
                raise_explained(error, self._name)

    def _here(self, leaf: Any) -> Any:
        """Moves an argument from another device to those of the program."""
        if not isinstance(leaf, jax.Array) or len(leaf.devices()) > 1:
            return leaf
        if self._several is not None:
            return self._several.place(leaf)
        return leaf if self._home is None else jax.device_put(leaf, self._home)

    def _widened(self, leaf: Any) -> Any:
        """Converts an argument to an array over the devices of all workers."""
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            return leaf
        assert self._several is not None
        return self._several.widen(self._several.place(leaf))

    def _keep(self, given: Any) -> Any:
        arrays, donated, written, self._witness, trace = given
        if self._several is not None and self._several.is_wide:
            arrays = [*map(self._several.result, arrays)]
        if self._waits:
            jax.block_until_ready((arrays, donated, written))
            jax.effects_barrier()
        self.num_calls += 1
        for slot, array in zip(self._donated, donated, strict=True):
            if slot.key in slot.attributes:
                slot.attributes[slot.key] = slot.seen = slot.array = array
            else:
                slot.keep(array)
        for slot, array in zip(self._given, written, strict=True):
            slot.keep(array)
        return unpacked(self._outlines[len(trace)], arrays)

    def _survey(self, leaves: list[Any]) -> None:
        """Traces the function once, only to find its variables."""
        self._log.note(leaves)
        make_global_seed()
        hooks = keras_hooks()
        hooks.install_for_functions()
        install_cond()
        install_global_seed()
        trace = Trace({}, self._find)
        trace.is_survey = True

        def body(leaves: list[Any]) -> Any:
            with trace.entered():
                return packed(self._call(leaves))[0]

        refusing = (
            contextlib.nullcontext()
            if self._is_first
            else refusing_variables(self._name)
        )
        try:
            with hooks.creating(), refusing:
                program = jax.make_jaxpr(body)(leaves)
        except Exception as error:
            raise_explained(error, self._name)
        self._waits = has_callbacks(program.jaxpr)
        self._adopt(trace)

    def _adopt(self, trace: Trace) -> None:
        """Makes the program take and give the variables of a trace."""
        self._variables |= trace.variables
        if trace.layout is not None and trace.gate is not None:
            self._several, self._gate = trace.layout, trace.gate
            self.is_placed = True
        # Variables of a strategy lie on the devices that it runs on.
        self.is_placed = self.is_placed or any(
            "distribute_strategy" in vars(variable)
            for variable in self._variables.values()
        )
        known = {s.id for s in [*self._donated, *self._given]}
        written = known | set(trace.written)
        slots = [
            self._slots.of(variable, self._several)
            for key, variable in self._variables.items()
            if key in trace.values or key in known
        ]
        self._donated = [
            slot
            for slot in slots
            if slot.id in written and slot.donates and not self._waits
        ]
        donated = {slot.id for slot in self._donated}
        self._given = [
            s for s in slots if s.id in written and s.id not in donated
        ]
        read = [s for s in slots if s.id not in written]
        self._taken = [*self._donated, *self._given, *read]
        self._cut = len(self._donated)
        self.num_calls = 0

        # JAX's caches may keep this function, and must not keep the program.
        program = weakref.ref(self)

        def body(
            donated: list[Any], others: list[Any], leaves: list[Any]
        ) -> Any:
            alive = program()
            assert alive is not None
            return alive._traced([*donated, *others], leaves)

        body.__name__ = body.__qualname__ = self._name
        self._compiled = jax.jit(body, donate_argnums=0)

    def _traced(self, values: list[Any], leaves: list[Any]) -> Any:
        self.num_traces += 1
        if self.num_traces > 1:
            self._log.note(leaves)
        slots = self._taken
        trace = Trace(
            {
                s.id: s.inside(value)
                for s, value in zip(slots, values, strict=True)
            },
            self._find,
            variables=self._variables,
        )
        creating = keras_hooks().creating()
        with creating, refusing_variables(self._name), trace.entered():
            arrays, outline = packed(self._call(leaves))
        changing = [*self._donated, *self._given]
        if trace.unknown or set(trace.written) - {s.id for s in changing}:
            self._log.note(leaves, "variables that it did not know")
            self._adopt(trace)
            raise _GrownError

        def new(slot: Slot) -> Any:
            value = slot.outside(jnp.asarray(trace.values[slot.id]))
            value = lax.convert_element_type(value, slot.variable.dtype)
            if self._several is None:
                return value
            return lax.with_sharding_constraint(
                value, slot.sharding or self._several.whole
            )

        self._outlines.append(outline)
        if self._several is not None and self._several.is_wide:
            arrays = [
                lax.with_sharding_constraint(array, self._several.whole)
                if mark is ARRAY
                else array
                for array, mark in zip(arrays, marks_of(outline), strict=True)
            ]
        return (
            arrays,
            [new(slot) for slot in self._donated],
            [new(slot) for slot in self._given],
            # The gate waits for it: there may be no other result, and others
            # may be deleted by a later program.
            jnp.zeros((), "int32") if self._gate.waits else None,
            ((),) * (len(self._outlines) - 1),
        )

    def _find(self, trace: Trace, variable: keras.Variable) -> Any:
        # The lookup must not become a part of the program.
        with opened(None), eagerly():
            slot = self._slots.of(variable, trace.layout)
            array = slot.refresh()
            return None if array is None else slot.inside(array)


def _arrays_of(slots: list[Slot], num_donated: int) -> list[Any]:
    """Returns the variables' arrays, of which a program deletes the first ones.

    Those are never in memory that was lent.
    """
    found = []
    for index, slot in enumerate(slots):
        attributes = slot.attributes
        if (
            slot.seen is not None
            and attributes.get(slot.key) is slot.seen
            and not (index < num_donated and LENT in attributes)
        ):
            found.append(slot.array)
        else:
            found.append(slot.refresh())
    return found


def _unshared(found: list[Any], protect: bool) -> list[Any]:
    """Copies the arrays that others hold too, or all of them to `protect`."""
    counts = list(map(_COUNT, found))
    return [
        arrays.copy_of(array) if protect or count > _ALONE else array
        for array, count in zip(found, counts, strict=True)
    ]


_COUNT = sys.getrefcount


def _count_alone() -> int:
    """Counts references to an array that only its variable and slot hold."""
    slot = Slot.__new__(_SomeSlot)
    slot.attributes, slot.key = {}, "value"
    slot.attributes["value"] = slot.seen = slot.array = object()
    return max(map(_COUNT, _arrays_of([slot], 1)))


class _SomeSlot(Slot):
    def refresh(self) -> Any:
        return None


_ALONE = _count_alone()
