"""Records of the variables that a compiled function reads and writes."""

import contextlib
import threading
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NoReturn

import jax
import keras
from jax import numpy as jnp

from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import TraceError
from keras_dist.plugins import Overlay
from keras_dist.plugins import inlining
from keras_dist.plugins import opened
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.functions.cells import cell_of
from keras_dist_jax.functions.cells import read
from keras_dist_jax.functions.cells import write
from keras_dist_jax.machine import current_machine
from keras_dist_jax.placement.arrays import eagerly
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.sharding import shards
from keras_dist_jax.throttle import Throttle
from keras_dist_jax.variables.bindings import is_per_replica


class AssignedInside:
    """Knowledge of sharded variables that branches or loops assign."""

    # What a branch or loop reads of them must not be gathered around it. A
    # trace that has done so before it met the assignment is made again.

    def __init__(self) -> None:
        # Ids of those of which a part is assigned, and of those that are whole.
        self.parts: set[int] = set()
        self.whole: set[int] = set()
        self.is_outdated = False


class Trace:
    """One trace of a compiled function, which reads and writes cells."""

    def __init__(self, inside: "AssignedInside") -> None:
        self.inside = inside
        # By id: all variables that it met, whose values may be no tensors.
        self.variables: dict[int, keras.Variable] = {}
        self.scope = TraceScope(self)
        # The layout and throttle of a program on several devices.
        self.layout: Layout | None = None
        self.throttle: Throttle | None = None
        # The `ReplicaTrace` that is being traced, or `None`.
        self.of_replica: Any = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the current trace of its thread, while open."""
        before, current.trace = current.trace, self
        try:
            with inlining(), opened(self.scope):
                yield
        finally:
            current.trace = before
            self.scope.release()

    def use(self, layout: Layout, throttle: Throttle) -> None:
        """Notes that a part of the function runs on several devices."""
        if self.layout is not None and self.layout is not layout:
            raise StrategyMismatchError(
                "A compiled function ran functions of two strategies. "
                "Expected: one strategy in each compiled function. Compile "
                "two functions, and call them one after the other."
            )
        self.layout, self.throttle = layout, throttle

    def has(self, variable: keras.Variable) -> bool:
        """Notes a variable; tells whether it has a value."""
        self.variables[id(variable)] = variable
        owner = vars(variable).get("distribute_strategy")
        if owner is not None and not owner.plan.is_one_device:
            self.use(owner.executor.layout, owner.executor.throttle)
        if shards.is_sharded(variable):
            return shards.stored(variable) is not None
        if internals.array_of(variable) is not None:
            return True
        return current_machine() is not None

    def read(self, variable: keras.Variable) -> Any:
        """Returns a variable's value, with a replica axis if they differ."""
        if not self.has(variable):
            return None
        array = read(taken_cell(variable))
        if shards.is_sharded(variable):
            return shards.shards_of(variable).whole(array)
        return array

    def write(self, variable: keras.Variable, value: object) -> None:
        """Sets a variable's value, with a replica axis if replicas differ."""
        self.has(variable)
        if shards.is_sharded(variable):
            value = shards.shards_of(variable).stored(value)
        write(taken_cell(variable), value)


# The role of the cells of what programs take: all replicas' values of a
# variable if they differ, or an array in parts.
TAKEN = "taken"


def taken_cell(variable: keras.Variable) -> jax.Ref:
    """Returns the cell of what programs take of a variable."""
    shape = tuple(variable.shape)
    if shards.is_sharded(variable):
        shape = shards.shards_of(variable).stored_shape
    elif is_per_replica(variable):
        shape = variable.distribute_strategy.plan.num_replicas, *shape
    return cell_of(variable, TAKEN, shape)


class TraceScope(Overlay):
    """The scope of a traced function outside of replica functions."""

    is_base = True

    def __init__(self, trace: Any) -> None:
        super().__init__(eagerly=eagerly)
        self.below = None
        self.trace = trace

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.was_read.add(id(variable))
        value = self.trace.read(variable)
        if value is None or not is_per_replica(variable):
            return value
        return combined(variable, self.everyone(value))

    def everyone(self, value: Any) -> list[Any]:
        """Returns all replicas' values of a per-replica variable."""
        return list(value)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if is_per_replica(variable):
            count = variable.distribute_strategy.plan.num_replicas
            value = jnp.stack(
                [share_of(variable, value, i, count) for i in range(count)]
            )
        self.trace.write(variable, value)

    def forget(self, variable: keras.Variable) -> None:
        """Does nothing: the scope keeps no values."""


def combined(variable: keras.Variable, values: Iterable[Any]) -> Any:
    """Combines replicas' values of a variable for cross-replica context."""
    values = list(values)
    if variable.aggregation not in ("sum", "mean"):
        return values[0]
    total = sum(values[1:], values[0])
    if variable.aggregation == "mean":
        total = total / len(values)
    return total.astype(variable.dtype)


def share_of(variable: Any, value: Any, index: int, count: int) -> Any:
    """Returns one replica's share of a value for all replicas."""
    if variable.aggregation != "sum":
        return value
    if variable.is_total:
        return value if index == 0 else jnp.zeros_like(value)
    if keras.backend.is_int_dtype(variable.dtype):
        rest = jnp.mod(value, count) if index == 0 else 0
        return jnp.floor_divide(value, count) + rest
    return value / count


class _ThreadTrace(threading.local):
    trace: Trace | None = None


current = _ThreadTrace()


def current_trace() -> Trace | None:
    """Returns this thread's trace, or `None`."""
    return current.trace


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


# In what JAX says of assignments in mapped functions.
_MAPPED = (
    "vmapped value on an unbatched array reference",
    "State effect not supported in vmap",
)


def raise_explained(error: BaseException, name: str) -> NoReturn:
    """Raises a `TraceError` for one of JAX's errors, or the error itself."""
    received = (str(error).splitlines() or [""])[0]
    if isinstance(error, _NEEDS_VALUES) or (
        type(error) is TypeError and "of concrete values" in received
    ):
        raise TraceError(
            f"The compiled function '{name}' needs the value of a tensor while "
            "it is traced: for an `if` or `while`, `float()`, `int()`, "
            f"`convert_to_numpy`, or for a shape. Received: {received} "
            "Expected: operations on tensors. Use `keras.ops.where`, "
            "`keras.ops.cond` or `keras.ops.while_loop`, fixed shapes with a "
            "mask, or take that part out of `keras_dist.function`."
        ) from error
    if isinstance(error, jax.errors.UnexpectedTracerError):
        raise TraceError(
            f"The compiled function '{name}' uses a tensor that belongs to "
            "another trace: Python code kept it in a list, a global or an "
            "attribute, and it has no value outside of the trace. Received: "
            f"{received} Expected: tensors that are returned, or kept in a "
            "`keras.Variable` with `assign`."
        ) from error
    if any(part in str(error) for part in _MAPPED):
        raise TraceError(
            f"The compiled function '{name}' assigns a variable in a function "
            "that `jax.vmap` or `keras.ops.vectorized_map` maps, where each "
            f"row has a value or a branch of its own. Received: {received} "
            "Expected: one value for all rows. Return the values from the "
            "mapped function, and assign what you make of them outside."
        ) from error
    raise error
