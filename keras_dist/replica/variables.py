"""Variables with a component on each replica.

A `keras.Variable` that is created under a strategy with several replicas gets
one of these classes; it stays the same object, and a `keras.Variable`.

The tensor that `keras.Variable` holds is the value in cross-replica context,
which is also the one that is saved. A `MirroredVariable` has a copy of it on
each replica, a `CentralVariable` has a single copy. A `SyncOnReadVariable` also
has a component for each replica, which is created at its first use.
"""

import functools
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core.components import Component
from keras_dist.core.components import VariableComponent
from keras_dist.core.context import inlines
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import PerReplica
from keras_dist.core.values import framed
from keras_dist.errors import StrategyMismatchError
from keras_dist.internals import keras_internals
from keras_dist.internals.keras_internals import opened
from keras_dist.replica.aggregation import set_all_components
from keras_dist.replica.scopes import Overlay
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.scopes import forget_above
from keras_dist.replica.state import current_call


class DistributedVariable(keras.Variable):
    """Base class of the variables with a component on each replica."""

    distribute_strategy: Any

    @property
    def values(self) -> tuple["VariableComponent", ...]:
        """The components, in replica order."""
        count = self.distribute_strategy.plan.num_local_replicas
        return tuple(VariableComponent(self, index) for index in range(count))

    @property
    def value(self) -> Any:
        call = current_call()
        if call is None:
            return super().value
        scope = keras_internals.stateless_scope()
        if (
            scope is None
            or scope is call.scope
            or isinstance(scope, Overlay)
            or scope.get_current_value(self) is not None
        ):
            return super().value
        # The user's own StatelessScope has no value for this variable.
        keras_internals.set_stateless_scope(call.scope)
        try:
            return super().value
        finally:
            keras_internals.set_stateless_scope(scope)

    def component_value(self, index: int) -> Any:
        """Returns the tensor that replica `index` reads."""
        raise NotImplementedError

    def write_component(self, index: int, value: Any) -> None:
        """Replaces the tensor that replica `index` reads."""
        raise NotImplementedError

    def assign(self, value: Any) -> Any:
        return self._write("assign", value)

    def assign_add(self, value: Any) -> Any:
        return self._write("assign_add", value)

    def assign_sub(self, value: Any) -> Any:
        return self._write("assign_sub", value)

    def _write(self, method: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            # Some backends read the array later, when the user may have
            # changed it.
            value = value.copy()
        if isinstance(value, bool):
            value = int(value)
        elif isinstance(value, (list, tuple, np.ndarray, np.generic)):
            is_float = keras.backend.is_float_dtype(self._dtype)
            value = ops.convert_to_tensor(
                value, dtype=self._dtype if is_float else None
            )
        call = current_call()
        if call is not None and base_scope() is call.scope:
            return self._write_in_replica(call, method, value)
        if keras_internals.stateless_scope() is not None:
            # The scope of a step of `fit`, or the user's own.
            return super().assign(written(self, method, value))
        if isinstance(value, PerReplica):
            raise ValueError(
                f"Variable '{self.path}' was given a value for each replica "
                f"in cross-replica context. Received: {value!r}. Expected: "
                "one value. Combine them first with `strategy.reduce`, or "
                "assign inside of `strategy.run`."
            )
        return self._write_in_cross_replica(method, value)

    def _write_in_replica(self, call: Any, method: str, value: Any) -> Any:
        raise NotImplementedError

    def _write_in_cross_replica(self, method: str, value: Any) -> Any:
        is_tensor = hasattr(value, "shape")
        is_added = is_tensor and not isinstance(value, keras.Variable)
        if method != "assign" and is_added:
            value = self.distribute_strategy.executor.mirror(value)
        return self.write_plainly(written(self, method, value))

    def write_plainly(self, value: Any) -> Any:
        """Assigns a value as Keras does, then places it by the plan."""
        # The result of `assign` is not kept: a second reference to an array
        # would make a later update copy it.
        super().assign(value)
        self.distribute_strategy.executor.place(self)
        return self.value

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __repr__(self) -> str:
        if keras_internals.has_value(self):
            return framed(self._kind, [repr(c) for c in self.values])
        return str(super().__repr__())

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedVariable":
        with self.distribute_strategy.scope():
            copy: DistributedVariable = keras.Variable(
                # A copy, since on some backends the two would share memory.
                ops.copy(keras_internals.value_of(self)),
                dtype=self._dtype,
                trainable=self.trainable,
                autocast=self._autocast,
                aggregation=self.aggregation,
                synchronization=self.synchronization,
                name=self.name,
            )
        memo[id(self)] = copy
        copy._path = self._path
        copy.constraint = deepcopy(self.constraint, memo)
        copy.regularizer = deepcopy(self.regularizer, memo)
        copy.overwrite_with_gradient = self.overwrite_with_gradient
        if self.synchronization == "on_read":
            copy.is_total = self.is_total
            copy.set_components([c.value for c in self.values])
        return copy


def written(variable: Any, method: str, value: Any) -> Any:
    """Returns a variable's value after `variable.method(value)`."""
    if method == "assign":
        return value
    # Like Keras' own methods; the operators accept lists and sparse tensors.
    return variable + value if method == "assign_add" else variable - value


class MirroredVariable(DistributedVariable):
    """A variable with equal copies, one on each replica.

    A write in replica context combines the replicas' values by `aggregation`.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     keras.Variable(1.0, name="v")
    MirroredVariable:{
      0: <Variable path=v, shape=(), dtype=float32, value=1.0>,
      1: <Variable path=v/replica_1, shape=(), dtype=float32, value=1.0>
    }
    """

    _kind = "MirroredVariable"

    def component_value(self, index: int) -> Any:
        return self.distribute_strategy.executor.copy_of(self, index)

    def write_component(self, index: int, value: Any) -> None:
        raise ValueError(
            f"One copy of mirrored variable '{self.path}' can't be written on "
            f"its own. Received: a value for replica {index}. Assign to the "
            "variable, or use `strategy.extended.update`."
        )

    def _write_in_replica(self, call: Any, method: str, value: Any) -> Any:
        if self.aggregation == "none":
            return keras.Variable.assign(self, written(self, method, value))
        if keras_internals.stateless_scope() is not call.scope:
            if isinstance(value, keras.Variable):
                value = value.value
            if hasattr(value, "dtype"):
                value = ops.stop_gradient(value)
        # Replicas wait for each other below the user's scopes, and later reads
        # give the combined value.
        forget_above(call.scope, self)
        with opened(call.scope):
            return call.assign(self, method, value)


class CentralVariable(MirroredVariable):
    """A variable with a single copy, which all replicas read.

    Replicas write to it as to a `MirroredVariable`. Its only component is the
    variable itself, and it prints as a plain variable.

    Example:

    >>> strategy = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     keras.Variable(1.0, name="v")
    <Variable path=v, shape=(), dtype=float32, value=1.0>
    """

    @property
    def values(self) -> tuple[Any, ...]:
        """The single copy, which is the variable itself."""
        return (self,)

    def __repr__(self) -> str:
        return str(keras.Variable.__repr__(self))


class SyncOnReadVariable(DistributedVariable):
    """A variable with a value for each replica, combined when read.

    A replica reads and writes its own value without waiting for the others. A
    read in cross-replica context combines all values by `aggregation`.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     counter = keras.Variable(
    ...         0.0, aggregation="sum", synchronization="on_read"
    ...     )
    >>> _ = strategy.run(lambda: counter.assign_add(1.0))
    >>> float(counter)
    2.0
    """

    _kind = "SyncOnReadVariable"
    _components: "list[Component] | None" = None
    # True if a value assigned in cross-replica context is the total, as for
    # the state of a metric. Other sums start with that value on each replica.
    is_total = True

    def begin(self, is_total: bool) -> None:
        """Sets the initial value of a variable that a strategy created."""
        self.is_total = is_total
        if self.aggregation == "sum" and not is_total:
            count = self.distribute_strategy.plan.num_replicas
            self.write_plainly(keras_internals.value_of(self) * count)

    def component_value(self, index: int) -> Any:
        return self._kept()[index].read()

    def write_component(self, index: int, value: Any) -> None:
        values = [component.read() for component in self._kept()]
        values[index] = value
        self.set_components(values)

    def set_components(self, values: Sequence[Any]) -> None:
        """Replaces the components, and combines them anew."""
        set_all_components([(self, values)])

    def hold_components(self, values: Sequence[Any], combined: Any) -> None:
        """Replaces the components and the combined value."""
        for component, value in zip(self._kept(), values, strict=True):
            component.write(value)
        self.write_plainly(combined)

    def share_out(self) -> None:
        """Sets the components so that they combine to the current value."""
        # A graph that is traced before there are components may run later,
        # when there are some.
        will_have = inlines() and keras_internals.in_tf_graph()
        if self._components is not None or will_have:
            for index, component in enumerate(self._kept()):
                component.write(self._share(index))

    def _kept(self) -> "list[Component]":
        if self._components is None:
            strategy = self.distribute_strategy
            make = strategy.executor.component
            self._components = [
                make(self, index, functools.partial(self._share, index))
                for index in range(strategy.plan.num_local_replicas)
            ]
            strategy.has_components[id(self)] = self
        return self._components

    def _share(self, index: int) -> Any:
        value = keras_internals.value_of(self)
        plan = self.distribute_strategy.plan
        is_first = plan.first_replica + index == 0
        if self.aggregation == "sum" and self.is_total:
            # Not in equal parts, whose sum might have a rounding error.
            value = value if is_first else ops.zeros_like(value)
        elif self.aggregation == "sum":
            count = plan.num_replicas
            if keras.backend.is_int_dtype(self._dtype):
                rest = ops.mod(value, count) if is_first else 0
                value = ops.floor_divide(value, count) + rest
            else:
                value = value / count
        executor = self.distribute_strategy.executor
        device = plan.devices[index]
        return executor.put(ops.copy(ops.cast(value, self._dtype)), device)

    def _write_in_replica(self, call: Any, method: str, value: Any) -> Any:
        return keras.Variable.assign(self, written(self, method, value))

    def _write_in_cross_replica(self, method: str, value: Any) -> Any:
        increases = method != "assign"
        if self.aggregation == "none" or (
            self.aggregation == "sum" and increases and not self.is_total
        ):
            raise ValueError(
                f"SyncOnReadVariable does not support `{method}` in "
                "cross-replica context when aggregation is set to "
                f"'{self.aggregation}'. Received: variable '{self.path}'. "
                "Assign inside of `strategy.run`"
                + (", or use `assign`." if increases else ".")
            )
        if increases and not self.is_total and self._components is not None:
            self.set_components(
                [written(c, method, value) for c in self.values]
            )
            return self.value
        result = super()._write_in_cross_replica(method, value)
        self.share_out()
        return result


class UnaggregatedVariable(SyncOnReadVariable):
    """A `SyncOnReadVariable` that can only be read in replica context."""

    _is_written = False

    def write_plainly(self, value: Any) -> Any:
        self._is_written = True
        try:
            return super().write_plainly(value)
        finally:
            self._is_written = False

    @property
    def value(self) -> Any:
        if not self._is_written and keras_internals.stateless_scope() is None:
            raise ValueError(
                f"Could not convert from variable '{self.path}' to a tensor "
                "in cross-replica context: it has a value on each replica, "
                "and its aggregation is VariableAggregation.NONE. Read it in "
                "`strategy.run`, or its components with "
                "`strategy.experimental_local_results`."
            )
        return super().value


DistributedValues.register(DistributedVariable)


def adopt(variable: keras.Variable) -> None:
    """Changes a plain variable's class to that of a distributed variable."""
    if type(variable) is not keras.Variable:
        return
    if variable.synchronization != "on_read":
        is_central = variable.distribute_strategy.plan.is_central
        variable.__class__ = CentralVariable if is_central else MirroredVariable
    elif variable.aggregation == "none":
        variable.__class__ = UnaggregatedVariable
    else:
        variable.__class__ = SyncOnReadVariable


def check_owner(variable: keras.Variable, strategy: object) -> None:
    """Raises `StrategyMismatchError` for a variable of another strategy."""
    owner = vars(variable).get("distribute_strategy")
    if owner is not None and owner is not strategy:
        raise StrategyMismatchError(
            f"Variable '{variable.path}' was made under {owner!r} and is used "
            f"under {strategy!r}. Expected: one strategy. Make the model, its "
            "layers and its optimizer under the same `strategy.scope()`."
        )
