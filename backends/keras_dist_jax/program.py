"""One compiled program: a function, for one structure of arguments."""

import contextlib
import logging
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp

from keras_dist.compilation import refusing_variables
from keras_dist.errors import TraceError
from keras_dist.regroup import map_nest
from keras_dist.training import seams
from keras_dist.training.creation import creation_hooks
from keras_dist.training.keras_internals import make_global_seed
from keras_dist.training.overlay import opened
from keras_dist.values import PerReplica
from keras_dist_jax import arrays
from keras_dist_jax.control_flow import install_cond
from keras_dist_jax.divergence import has_callbacks
from keras_dist_jax.gate import Gate
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.placement import LENT
from keras_dist_jax.slots import Slot
from keras_dist_jax.slots import Slots
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import eagerly

_log = logging.getLogger("keras_dist.function")


class _GrownError(Exception):
    """A trace met variables that the program does not take or give."""


class Program:
    """Runs a function on the arrays of the variables that it uses.

    Args:
        name: String, what messages and profiles call it.
        call: Callable that calls the function, given the traced arguments.
        slots: The compiler's `Slots`.
        gate: Bounds the programs under way.
        is_first: Boolean, whether the function was never traced before.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Sequence[Any]], Any],
        slots: Slots,
        gate: Gate,
        is_first: bool,
    ) -> None:
        self._name = name
        self._call = call
        self._slots = slots
        self._gate = gate
        self._is_first = is_first
        # Variables that are written: their arrays may be deleted, or not.
        self._donated: list[Slot] = []
        self._given: list[Slot] = []
        self._read: list[Slot] = []
        self._variables: dict[int, keras.Variable] = {}
        self._compiled: Any = None
        # Whether Python is called back, which may raise.
        self._waits = False
        self._held: list[Any] = []
        self._witness: Any = None
        self.num_traces = 0

    def run(self, leaves: list[Any]) -> Any:
        """Calls the function.

        Args:
            leaves: List of the traced arguments.

        Returns:
            What the function returned, with arrays for tensors.

        Raises:
            TraceError: If it can't be compiled.
        """
        protect = self._compiled is None
        if protect:
            self._survey(leaves)
        gate, held = self._gate, self._held
        with gate.lock:
            while True:
                donated = _arrays_of(self._donated, donates=True)
                if protect or max(map(_COUNT, donated), default=0) > _ALONE:
                    donated = _unshared(donated, protect)
                read = _arrays_of(self._read)
                given = _arrays_of(self._given) if self._given else []
                gate.settle(self)
                try:
                    # In C, so that no interrupt comes between a program that
                    # has deleted its inputs and keeping what it gave.
                    held.extend(
                        map(
                            self._compiled,
                            (donated,),
                            (given,),
                            (read,),
                            (leaves,),
                        )
                    )
                    result = self._keep()
                except _GrownError:
                    protect = True
                    continue
                except Exception as error:
                    raise _explained(error, self._name) from error
                except BaseException:
                    if held:
                        self._keep()
                    raise
                finally:
                    held.clear()
                gate.enter(self, self._witness)
                return result

    def _keep(self) -> Any:
        result, donated, given, self._witness = self._held[0]
        if self._waits:
            jax.block_until_ready((result, donated, given))
        for slot, array in zip(self._donated, donated, strict=True):
            if slot.key in slot.attributes:
                slot.attributes[slot.key] = slot.seen = slot.array = array
            else:
                slot.keep(array)
        for slot, array in zip(self._given, given, strict=True):
            slot.keep(array)
        return result

    def _survey(self, leaves: list[Any]) -> None:
        """Traces once, only to find the variables."""
        make_global_seed()
        seams.install_building()
        seams.install_losses_of_layers()
        install_cond()
        trace = Trace({}, self._find)

        def body(leaves: list[Any]) -> Any:
            with trace.entered():
                return _packed(trace, self._call(leaves))

        refusing = (
            contextlib.nullcontext()
            if self._is_first
            else refusing_variables(self._name)
        )
        try:
            with creation_hooks(), refusing:
                program = jax.make_jaxpr(body)(leaves)
        except Exception as error:
            raise _explained(error, self._name) from error
        self._waits = has_callbacks(program.jaxpr)
        self._adopt(trace)

    def _adopt(self, trace: Trace) -> None:
        """Takes and gives what a trace has met, from now on."""
        self._variables |= trace.variables
        known = {s.id for s in [*self._donated, *self._given]}
        written = known | set(trace.written)
        slots = [
            self._slots.of(variable)
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
        self._read = [s for s in slots if s.id not in written]

        def body(
            donated: list[Any],
            given: list[Any],
            read: list[Any],
            leaves: list[Any],
        ) -> Any:
            return self._traced(donated, given, read, leaves)

        body.__name__ = body.__qualname__ = self._name
        self._compiled = jax.jit(body, donate_argnums=0)

    def _traced(
        self,
        donated: list[Any],
        given: list[Any],
        read: list[Any],
        leaves: list[Any],
    ) -> Any:
        self.num_traces += 1
        _log.info(
            "'%s' is traced for arguments %s (trace %d of this program)",
            self._name,
            [jax.typeof(leaf).str_short() for leaf in leaves],
            self.num_traces,
        )
        slots = [*self._donated, *self._given, *self._read]
        values = [*donated, *given, *read]
        trace = Trace(
            {s.id: value for s, value in zip(slots, values, strict=True)},
            self._find,
            variables=self._variables,
        )
        with creation_hooks(), refusing_variables(self._name), trace.entered():
            result = _packed(trace, self._call(leaves))
        changing = [*self._donated, *self._given]
        if trace.unknown or set(trace.written) - {s.id for s in changing}:
            _log.info("'%s' uses variables that it did not know", self._name)
            self._adopt(trace)
            raise _GrownError

        def new(slot: Slot) -> Any:
            value = jnp.asarray(trace.values[slot.id])
            return lax.convert_element_type(value, slot.variable.dtype)

        return (
            result,
            [new(slot) for slot in self._donated],
            [new(slot) for slot in self._given],
            # Nothing else that a program gives is sure to be there and kept.
            jnp.zeros((), "int32") if self._gate.waits else None,
        )

    def _find(self, variable: keras.Variable) -> Any:
        # Now, and not as a part of the program.
        with opened(None), eagerly():
            return self._slots.of(variable).refresh()


def _arrays_of(slots: list[Slot], donates: bool = False) -> list[Any]:
    found = []
    for slot in slots:
        attributes = slot.attributes
        if (
            slot.seen is not None
            and attributes.get(slot.key) is slot.seen
            and not (donates and LENT in attributes)
        ):
            found.append(slot.array)
        else:
            found.append(slot.refresh())
    return found


def _unshared(found: list[Any], protect: bool) -> list[Any]:
    """The arrays, with copies in place of those that have to live on."""
    counts = list(map(_COUNT, found))
    return [
        arrays.copy_of(array) if protect or count > _ALONE else array
        for array, count in zip(found, counts, strict=True)
    ]


_COUNT = sys.getrefcount


def _count_alone() -> int:
    """What an array counts that only its variable and its slot hold."""
    slot = Slot.__new__(_SomeSlot)
    slot.attributes, slot.key = {}, "value"
    slot.attributes["value"] = slot.seen = slot.array = object()
    return max(map(_COUNT, _arrays_of([slot])))


class _SomeSlot(Slot):
    def refresh(self) -> Any:
        return None


_ALONE = _count_alone()


def _packed(trace: Trace, nest: Any) -> Any:
    """A result as JAX can return it."""

    def pack(leaf: Any) -> Any:
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        if isinstance(leaf, JoinedPerReplica):
            return _Packed(leaf.joined, leaf)
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
            return leaf
        if leaf is None or isinstance(leaf, PerReplica):
            return leaf
        return _Constant(leaf)

    return map_nest(pack, nest)


class _Packed:
    """A per-replica value among the results of a program."""

    def __init__(self, joined: Any, like: JoinedPerReplica) -> None:
        self.joined = joined
        self.like = like


class _Constant:
    """A result that is no tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


jax.tree_util.register_pytree_node(
    _Packed,
    lambda packed: ((packed.joined,), packed.like.kind),
    lambda kind, children: JoinedPerReplica(children[0], *kind),
)
jax.tree_util.register_pytree_node(
    _Constant,
    lambda constant: ((), constant),
    lambda constant, _: constant.value,
)


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def _explained(error: Exception, name: str) -> Exception:
    """The error to raise for one of JAX's."""
    if isinstance(error, _NEEDS_VALUES):
        return TraceError(
            f"The compiled function '{name}' needs the value of a tensor while "
            "it is traced: for an `if` or `while`, `float()`, `int()`, "
            "`convert_to_numpy`, or for a shape. Received: "
            f"{str(error).splitlines()[0]} Expected: operations on tensors. "
            "Use `keras.ops.where`, `cond` or `while_loop`, fixed shapes with "
            "a mask, or take that part out of `keras_dist.function`."
        )
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return TraceError(
            f"The compiled function '{name}' uses a tensor that belongs to "
            "another trace: Python kept it, in a list, a global or an "
            "attribute, and it has no value outside of the trace. Received: "
            f"{str(error).splitlines()[0]} Expected: tensors that are "
            "returned, or kept in a `keras.Variable` with `assign`."
        )
    return error
