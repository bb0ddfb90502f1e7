"""Variables with a component on each replica. The tensor that `keras.Variable`
holds is the value in cross-replica context, which is saved."""

from copy import deepcopy
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core.components import VariableComponent
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import PerReplica
from keras_dist.core.values import framed
from keras_dist.internals import keras_internals
from keras_dist.internals.keras_internals import opened
from keras_dist.plugin.storage import ShardedStorage
from keras_dist.plugin.storage import Storage
from keras_dist.replica.scopes import Overlay
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.scopes import forget_above
from keras_dist.replica.state import ReplicaScope
from keras_dist.replica.state import current_call
from keras_dist.replica.state import of_thread

# Not by `super`, which PyTorch's compiler does not follow to a property.
_value_of = keras.Variable.value.fget


class DistributedVariable(keras.Variable):
    """Base class of the variables with a component on each replica."""

    distribute_strategy: Any

    @property
    def storage(self) -> Storage:
        """The place where the variable rests."""
        storage: Storage = self.distribute_strategy.executor.storage(self)
        return storage

    @property
    def values(self) -> tuple["VariableComponent", ...]:
        """The components, in replica order."""
        count = self.distribute_strategy.plan.num_local_replicas
        return tuple(VariableComponent(self, index) for index in range(count))

    @property
    def value(self) -> Any:
        call = of_thread.call
        if call is None:
            # Each step reads often, and Keras' own way takes a dozen calls.
            opened = keras_internals.global_state.GLOBAL_STATE_TRACKER
            scope, current = getattr(opened, "stateless_scope", None), None
            if (
                getattr(opened, "autocast_scope", None) is not None
                or str(getattr(opened, "torch_device", None)) == "meta"
            ):
                pass  # another tensor stands for the value
            elif scope is None:
                current = self._value
            elif type(scope) is ReplicaScope or isinstance(scope, Overlay):
                current = scope.get_current_value(self)
            return _value_of(self) if current is None else current
        scope = keras_internals.stateless_scope()
        if (
            scope is None
            or scope is call.scope
            or isinstance(scope, Overlay)
            or scope.get_current_value(self) is not None
        ):
            return _value_of(self)
        # The user's own StatelessScope has no value for this variable.
        keras_internals.set_stateless_scope(call.scope)
        try:
            return _value_of(self)
        finally:
            keras_internals.set_stateless_scope(scope)

    def component_value(self, index: int) -> Any:
        """Returns the tensor that replica `index` reads."""
        raise NotImplementedError

    def write_component(self, index: int, value: object) -> None:
        """Replaces the tensor that replica `index` reads."""
        raise NotImplementedError

    def assign(self, value: object) -> Any:
        return self._write("assign", value)

    def assign_add(self, value: object) -> Any:
        return self._write("assign_add", value)

    def assign_sub(self, value: object) -> Any:
        return self._write("assign_sub", value)

    def _write(self, method: str, value: object) -> Any:
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
        call = of_thread.call
        if call is not None and base_scope() is call.scope:
            return self._write_in_replica(call, method, value)
        if keras_internals.stateless_scope() is not None:
            # The scope of a step of `fit`, or the user's own.
            step = of_thread.step
            if step is not None and method == "assign":
                step.set_anew.add(id(self))
            return super().assign(written(self, method, value))
        if isinstance(value, PerReplica):
            raise ValueError(
                f"Variable '{self.path}' was given a value for each replica "
                f"in cross-replica context.\nReceived: {value!r}. Expected: "
                "one value. Combine them first with `strategy.reduce`, or "
                "assign inside of `strategy.run`."
            )
        return self._write_in_cross_replica(method, value)

    def _write_in_replica(
        self, call: object, method: str, value: object
    ) -> Any:
        raise NotImplementedError

    def _write_in_cross_replica(self, method: str, value: object) -> Any:
        step = of_thread.step
        if step is not None and step.is_compiled:
            step.check_assigned(self)
        executor = self.distribute_strategy.executor
        if executor.workers is not None:
            executor.workers.note_assigned(self)
        is_tensor = hasattr(value, "shape")
        is_added = is_tensor and not isinstance(value, keras.Variable)
        if method != "assign" and is_added:
            value = executor.mirror(value)
        return self.write_plainly(written(self, method, value))

    def write_plainly(self, value: object) -> Any:
        """Assigns a value as Keras does, then places it by the plan."""
        # The result of `assign` is not kept: a second reference to an array
        # would make a later update copy it.
        super().assign(value)
        executor = self.distribute_strategy.executor
        if not executor.assigns_in_place:
            executor.storage(self).place()
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


def written(variable: keras.Variable, method: str, value: object) -> Any:
    """Returns a variable's value after `variable.method(value)`."""
    if method == "assign":
        return value
    # Like Keras' own methods; the operators accept lists and sparse tensors.
    return variable + value if method == "assign_add" else variable - value


class MirroredVariable(DistributedVariable):
    """A variable with equal copies, one on each replica."""

    _kind = "MirroredVariable"

    def component_value(self, index: int) -> Any:
        return self.storage.read(index)

    def write_component(self, index: int, value: object) -> None:
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
    """A variable with a single copy, which all replicas read."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The single copy, which is the variable itself."""
        return (self,)

    def __repr__(self) -> str:
        return str(keras.Variable.__repr__(self))


class ShardedVariable(MirroredVariable):
    """A sharded variable, joined when read, split when assigned.
    With several workers, all of them have to read it together."""

    @property
    def storage(self) -> ShardedStorage:
        """The place where the parts rest."""
        storage: ShardedStorage = self.distribute_strategy.executor.storage(
            self
        )
        return storage

    @property
    def value(self) -> Any:
        return self.storage.used(super().value)

    @property
    def _value(self) -> Any:
        storage = self.storage
        return storage.whole() if storage.is_split else vars(self).get("_value")

    @_value.setter
    def _value(self, value: object) -> None:
        storage = self.storage
        if storage.is_split:
            storage.set_whole(value)
        else:
            self.__dict__["_value"] = value

    def __array__(self, dtype: Any = None) -> Any:
        storage, scope = self.storage, keras_internals.stateless_scope()
        if storage.is_split and scope is None and current_call() is None:
            value = storage.on_host()
            if value is not None:
                return np.asarray(value, dtype)
        return super().__array__(dtype)

    @property
    def trainable(self) -> bool:
        return bool(self._trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        storage = self.storage
        if storage.is_split:
            self._trainable = value
            storage.set_trainable(value)
        else:
            keras.Variable.trainable.fset(self, value)

    def _direct_assign(self, value: object) -> None:
        storage = self.storage
        if storage.is_split:
            storage.set_whole(value)
        else:
            super()._direct_assign(value)

    def write_plainly(self, value: object) -> Any:
        # Returns the given value, because reading takes all workers.
        result = keras.Variable.assign(self, value)
        self.storage.place()
        return result

    def __repr__(self) -> str:
        if self.distribute_strategy.executor.workers is None:
            return str(super().__repr__())
        return (
            f"<Variable path={self.path}, shape={self.shape}, "
            f"dtype={self.dtype}, in parts>"
        )


DistributedValues.register(DistributedVariable)
