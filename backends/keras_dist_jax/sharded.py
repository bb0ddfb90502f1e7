"""Optimizers whose state is sharded over the replicas.

Updates are Keras' own, of whole variables. Shardings tell the compiler what
each device needs and keeps a part of; it finds the collectives.
"""

import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.replica.adoption import adopt_slot
from keras_dist.replica.scopes import Recording
from keras_dist.sharding.sharded_optimizer import check_variables
from keras_dist.sharding.supported import check_optimizer
from keras_dist.sharding.supported import inner_of
from keras_dist.sharding.supported import rate_now
from keras_dist.sharding.supported import settings_text
from keras_dist_jax import keras_internals as internals
from keras_dist_jax import shards
from keras_dist_jax.gate import Gate
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import StepFn
from keras_dist_jax.optimizer_calls import Updates
from keras_dist_jax.shards import Shards

_OPTIMIZER_GROUP = internals.STATE_GROUPS.index("optimizer_variables")


def shard_state(optimizer: Any, layout: Layout) -> None:
    """Shards the variables that a built optimizer has for others."""
    check_optimizer(optimizer)
    trained = internals.trained_by(optimizer)
    check_variables(trained)
    shapes = {tuple(variable.shape) for variable in trained} - {()}
    for variable in optimizer.variables:
        if tuple(variable.shape) in shapes:
            shards.mark_slot(variable)
        if shards.is_slot(variable):
            adopt_slot(variable, trained[0])
            shards.split(variable, layout)


class ConstrainedUpdates(Updates):
    """Updates of which each device makes its part."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def of_values(
        self, optimizer: Any, original: Any, state: Any, grads: Any, values: Any
    ) -> Any:
        parts = [*map(self._part, grads)], [*map(self._part, values)]
        new, state = original(state, *parts)
        return [*map(self._whole, new)], state

    def of_variables(
        self, optimizer: Any, original: Any, grads: Any, variables: Any
    ) -> None:
        trained = internals.trained_by(optimizer, variables)
        for variable in trained:
            variable.assign(self._part(variable.value))
        original([*map(self._part, grads)], variables)
        for variable in trained:
            variable.assign(self._whole(variable.value))

    def _part(self, value: Any) -> Any:
        if not isinstance(value, jax.core.Tracer):
            return value
        # Whole before: else the compiler cuts what the value is made of, too.
        parts = Shards(value.shape, self._layout)
        return parts.constrained(self._whole(value))

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, jax.core.Tracer):
            return value
        return jax.lax.with_sharding_constraint(value, self._layout.whole)


def sharded_step(layout: Layout, model: keras.Model, step: StepFn) -> StepFn:
    """Makes a training step of sharded state from one of whole variables."""
    known = weakref.ref(model)
    for optimizer in internals.optimizers_of(model):
        if optimizer.built:
            shard_state(optimizer, layout)

    def run(state: Any, data: Any) -> tuple[Any, Any]:
        model = known()
        assert model is not None
        optimizers = internals.optimizers_of(model)
        for optimizer in optimizers:
            if optimizer.built:
                shard_state(optimizer, layout)
        old = [list(group) for group in state]
        owners: list[list[Any]] = [[None] * len(group) for group in old]
        owners[_OPTIMIZER_GROUP] = [v for o in optimizers for v in o.variables]
        given = [
            list(map(_value_in, *each))
            for each in zip(owners, old, strict=True)
        ]
        with ConstrainedUpdates(layout).replacing(optimizers):
            outputs, new = step(tuple(map(list, given)), data)
        new = [list(group) for group in new]
        if list(map(len, new)) != list(map(len, old)):
            return outputs, new
        return outputs, [
            [
                before if value is seen else _array_in(owner, value, layout)
                for owner, value, seen, before in zip(*each, strict=True)
            ]
            for each in zip(owners, new, given, old, strict=True)
        ]

    run.__name__ = step.__name__
    return run


def _value_in(variable: keras.Variable | None, array: Any) -> Any:
    """Returns a variable's whole value in a step, from the state's array."""
    if variable is None or not shards.is_sharded(variable):
        return array
    if isinstance(array, jax.core.Tracer):
        return shards.shards_of(variable).whole(array)
    return shards.whole(variable, array)


def _array_in(
    variable: keras.Variable | None, value: Any, layout: Layout
) -> Any:
    """Returns the state's array of a new value, with its sharding."""
    is_sharded = variable is not None and shards.is_sharded(variable)
    if not isinstance(value, jax.core.Tracer):
        return shards.array_of(variable, value) if is_sharded else value
    sharding = layout.whole
    if is_sharded:
        value = shards.shards_of(variable).stored(value)
        sharding = shards.shards_of(variable).sharding
    return jax.lax.with_sharding_constraint(value, sharding)


class EagerUpdate:
    """An update of arrays, as one compiled program for each kind of settings.

    Operations that run one by one on several devices would be much slower.
    """

    def __init__(self, optimizer: Any, layout: Layout, gate: Gate) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._gate = gate
        self._layout = layout
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> list[tuple[keras.Variable, Any]]:
        """Updates once; returns all variables, each with its new array."""
        optimizer = self._optimizer()
        state = _state_of(optimizer, variables)
        # A schedule, or a function of the user's, is evaluated at each update.
        rate = rate_now(optimizer)
        key = (
            settings_text(optimizer, internals.trained_by(optimizer)),
            tuple(map(id, state)),
            tuple(map(id, variables)),
        )
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._program(state, variables))
        arrays = self._gate.run(
            self._compiled[key],
            [*map(self._widened, map(_array_of, state))],
            [*map(self._widened, gradients)],
            None if rate is None else np.asarray(rate, "float32"),
        )
        return list(zip(state, map(self._layout.narrow, arrays), strict=True))

    def _program(
        self,
        state: list[keras.Variable],
        variables: Sequence[keras.Variable],
    ) -> Callable[..., Any]:
        layout = self._layout

        def update(arrays: Any, gradients: Any, rate: Any) -> Any:
            optimizer: Any = self._optimizer()
            values = list(map(_value_in, state, arrays))
            updates = ConstrainedUpdates(layout).replacing([optimizer])
            recording = Recording(zip(state, values, strict=True))
            with recording, updates, internals.at_rate(optimizer, rate):
                optimizer.apply(gradients, list(variables))
            written = {id(v): value for v, value in recording.written}
            return [
                _array_in(v, written.get(id(v), before), layout)
                for v, before in zip(state, values, strict=True)
            ]

        return update

    def _widened(self, array: Any) -> Any:
        if array is None or not array.is_fully_addressable:
            return array
        if isinstance(array.sharding, jax.sharding.NamedSharding) and (
            not array.is_fully_replicated
        ):
            return array
        return self._layout.widen(self._layout.place(array))


def _state_of(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Returns all variables that an update may read or write."""
    own = [
        value
        for value in vars(inner_of(optimizer)).values()
        if isinstance(value, keras.Variable)
    ]
    trained = internals.trained_by(optimizer)
    found = [*optimizer.variables, *own, *trained, *variables]
    return list({id(variable): variable for variable in found}.values())


def _array_of(variable: keras.Variable) -> Any:
    if shards.is_sharded(variable):
        return shards.stored(variable)
    return internals.array_of(variable)
