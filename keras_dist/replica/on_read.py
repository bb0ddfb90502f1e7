"""Variables with a value for each replica, combined when they are read."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_dist.core.components import Component
from keras_dist.core.context import inlines
from keras_dist.internals import keras_internals
from keras_dist.replica.aggregation import set_all_components
from keras_dist.replica.state import of_thread
from keras_dist.replica.variables import DistributedVariable
from keras_dist.replica.variables import written


class SyncOnReadVariable(DistributedVariable):
    """A variable with a value for each replica, combined when read."""

    _kind = "SyncOnReadVariable"
    # The value for all replicas that a compiled program of the backend gave,
    # while nothing has read it, and the function that calls `set_components`.
    uncombined: Any = None
    combine: "Callable[[Any], None]"
    _local_components: "list[Component] | None" = None
    # True if a value assigned in cross-replica context is the total, as for
    # the state of a metric. Other sums start with that value on each replica.
    is_total = True

    @property
    def _value(self) -> Any:
        if self.uncombined is not None:
            self.combine(self)
        return vars(self).get("_value")

    @_value.setter
    def _value(self, value: object) -> None:
        if self.uncombined is not None:
            self.combine(self)
        self.__dict__["_value"] = value

    @property
    def _components(self) -> "list[Component] | None":
        if self.uncombined is not None:
            self.combine(self)
        return self._local_components

    def assign_add(self, value: object) -> Any:
        step = of_thread.step
        if step is None or step.additions is None:
            return super().assign_add(value)
        step.additions.append((self, value))
        return value

    def begin(self, is_total: bool) -> None:
        """Sets the initial value of a variable that a strategy created."""
        self.is_total = is_total
        if self.aggregation == "sum" and not is_total:
            count = self.distribute_strategy.plan.num_replicas
            self.write_plainly(keras_internals.value_of(self) * count)

    def component_value(self, index: int) -> Any:
        return self._kept()[index].read()

    def write_component(self, index: int, value: object) -> None:
        values = [component.read() for component in self._kept()]
        values[index] = value
        self.set_components(values)

    def set_components(self, values: Sequence[Any]) -> None:
        """Replaces the components, and combines them anew."""
        set_all_components([(self, values)])

    def hold_components(self, values: Sequence[Any], combined: object) -> None:
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
            make = self.storage.component
            self._local_components = [
                make(index, functools.partial(self._share, index))
                for index in range(strategy.plan.num_local_replicas)
            ]
            strategy.has_components[id(self)] = self
        assert self._local_components is not None
        return self._local_components

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

    def _write_in_replica(
        self, call: object, method: str, value: object
    ) -> Any:
        return keras.Variable.assign(self, written(self, method, value))

    def _write_in_cross_replica(self, method: str, value: object) -> Any:
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

    def write_plainly(self, value: object) -> Any:
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
