"""Optimizers whose state is sharded over the replicas.

Updates are Keras' own, on whole variables; the compiler makes each device
compute its part.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.core.plan import Plan
from keras_dist.internals.keras_optimizers import with_gradients
from keras_dist.plugin.home import Home
from keras_dist.plugin.powers import KeepsParts
from keras_dist.plugin.powers import UpdatesParts
from keras_dist.replica.adoption import adopt_slot
from keras_dist.replica.scopes import Recording
from keras_dist.sharding.sharded_optimizer import check_gradients
from keras_dist.sharding.sharded_optimizer import check_variables
from keras_dist.sharding.supported import check_optimizer
from keras_dist.sharding.supported import inner_of
from keras_dist.sharding.supported import rate_now
from keras_dist.sharding.supported import settings_text
from keras_dist_jax import keras_internals as internals
from keras_dist_jax import shards
from keras_dist_jax.executor import JaxExecutor
from keras_dist_jax.gate import Gate
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import StepFn
from keras_dist_jax.machine import jit
from keras_dist_jax.optimizer_calls import Updates
from keras_dist_jax.placement import SlotHome
from keras_dist_jax.replicas import JaxReplicas
from keras_dist_jax.running import Running
from keras_dist_jax.shards import Shards
from keras_dist_jax.trainer import Trainer
from keras_dist_jax.workers import JaxWorkers


class JaxShardedExecutor(JaxExecutor, KeepsParts):
    """The executor that shards the variables of optimizers."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        gate: Gate,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(plan, layout, gate, workers)
        self._replicas = ShardedReplicas(
            layout, gate, plan.first_replica, workers
        )

    def home(self, variable: keras.Variable) -> Home:
        if shards.is_slot(variable):
            return SlotHome(variable, self.plan, self.layout)
        return super().home(variable)

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        if variable.shape == reference.shape:
            shards.mark_slot(variable)

    def _trainer_of(self, model: keras.Model) -> Trainer:
        running = Running(model, self.layout, self.gate)
        return Trainer(running, functools.partial(sharded_step, self.layout))

    @contextlib.contextmanager
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = self._over_workers(variables)
        try:
            for variable in chosen:
                own = shards.shards_of(variable)
                value = own.on_host(shards.stored(variable))
                if self.plan.is_chief:
                    own.held = value
            yield
        finally:
            for variable in chosen:
                shards.shards_of(variable).held = None

    @contextlib.contextmanager
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = self._over_workers(variables)
        with self.readable_by_chief(chosen):
            yield
            for variable in chosen:
                own = shards.shards_of(variable)
                value, own.held = own.held, None
                if value is None:  # of another worker
                    dtype = shards.stored(variable).dtype
                    value = np.empty(variable.shape, dtype)
                assert self.workers is not None
                (value,) = self.workers.broadcast([value])
                internals.set_array(variable, value)

    def _over_workers(
        self, variables: Sequence[keras.Variable]
    ) -> list[keras.Variable]:
        if self.workers is None:
            return []
        return [each for each in variables if shards.is_sharded(each)]


class ShardedReplicas(JaxReplicas, UpdatesParts):
    """Replicas whose optimizers update each part on its own device."""

    def __init__(
        self,
        layout: Layout,
        gate: Gate,
        first: int = 0,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(layout, first, workers)
        self._gate = gate
        # The programs of each optimizer.
        self._programs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def update_parts(
        self,
        optimizer: Any,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        layout = self._layout
        shard_state(optimizer, layout)
        trained = internals.trained_by(optimizer, variables)
        everything = internals.trained_by(optimizer)
        check_gradients(optimizer, gradients[0], trained, everything)
        sums = self.sum_gradients(None, gradients, weights, trained)
        summed, trained = with_gradients(optimizer, sums, trained)
        state = _state_of(optimizer, trained)
        # A schedule, or a function of the user's, is evaluated at each update.
        rate = rate_now(optimizer)
        key = (
            settings_text(optimizer, everything),
            tuple(map(id, state)),
            tuple(map(id, trained)),
        )
        programs = self._programs.setdefault(optimizer, {})
        if key not in programs:
            # Compiled: single operations on several devices are much slower.
            update = _update(weakref.ref(optimizer), state, trained, layout)
            programs[key] = jit(update, _named)
        arrays = self._gate.run(
            programs[key],
            [*map(self._widened, map(_array_of, state))],
            [*map(self._widened, summed)],
            None if rate is None else np.asarray(rate, "float32"),
        )
        narrowed = list(map(layout.narrow, arrays))
        for variable, own in zip(state, narrowed, strict=True):
            if shards.is_sharded(variable):
                shards.give_back(variable, own)
            else:
                internals.set_array(variable, own)

    def _widened(self, array: Any) -> Any:
        if array is None or not array.is_fully_addressable:
            return array
        if isinstance(array.sharding, jax.sharding.NamedSharding) and (
            not array.is_fully_replicated
        ):
            return array
        return self._layout.widen(self._layout.place(array))


def _named(arrays: Any, gradients: Any, rate: Any) -> dict[str, Any]:
    """Names the arguments of an update."""
    return {"variables": arrays, "batch": [gradients, rate]}


def _update(
    known: Callable[[], Any],
    state: list[keras.Variable],
    trained: Sequence[keras.Variable],
    layout: Layout,
) -> Callable[..., Any]:
    """Makes an update of arrays, by the optimizer that `known` returns."""

    def update(arrays: Any, gradients: Any, rate: Any) -> Any:
        optimizer = known()
        values = list(map(_value_in, state, arrays))
        updates = ConstrainedUpdates(layout).replacing([optimizer])
        recording = Recording(zip(state, values, strict=True))
        with recording, updates, internals.at_rate(optimizer, rate):
            optimizer.apply(gradients, list(trained))
        written = {id(v): value for v, value in recording.written}
        return [
            _array_in(v, written.get(id(v), before), layout)
            for v, before in zip(state, values, strict=True)
        ]

    return update


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


def _shard_built(optimizers: Sequence[Any], layout: Layout) -> None:
    for optimizer in optimizers:
        if optimizer.built:
            shard_state(optimizer, layout)


class ConstrainedUpdates(Updates):
    """Updates of which each device computes its own part."""

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
        # The value is made whole first: else the compiler would also shard the
        # values that it is computed from.
        parts = Shards(value.shape, self._layout)
        return parts.constrained(self._whole(value))

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, jax.core.Tracer):
            return value
        return jax.lax.with_sharding_constraint(value, self._layout.whole)


def sharded_step(layout: Layout, model: keras.Model, step: StepFn) -> StepFn:
    """Makes a training step of sharded state from one of whole variables."""
    known = weakref.ref(model)
    _shard_built(internals.optimizers_of(model), layout)

    def run(state: Any, data: Any) -> tuple[Any, Any]:
        model = known()
        assert model is not None
        optimizers = internals.optimizers_of(model)
        _shard_built(optimizers, layout)
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
    own = shards.shards_of(variable)
    if isinstance(array, jax.core.Tracer):
        return own.whole(array)
    return own.placed(own.on_host(array))


def _array_in(
    variable: keras.Variable | None, value: Any, layout: Layout
) -> Any:
    """Returns the state's array of a new value, with its sharding."""
    sharding = layout.whole
    is_traced = isinstance(value, jax.core.Tracer)
    if variable is not None and shards.is_sharded(variable):
        own = shards.shards_of(variable)
        if not is_traced:
            return own.put(value)
        value, sharding = own.stored(value), own.sharding
    if not is_traced:
        return value
    return jax.lax.with_sharding_constraint(value, sharding)


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
