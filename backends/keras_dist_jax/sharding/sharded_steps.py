"""Steps and updates of sharded variables: Keras' own, which the compiler
divides over the replicas."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_dist.plugins import Plan
from keras_dist.plugins import Recording
from keras_dist.plugins import adopt_slot
from keras_dist.plugins import inner_of
from keras_dist.plugins import refusing_variables
from keras_dist.plugins import replaced
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import StepFn
from keras_dist_jax.sharding import scans
from keras_dist_jax.sharding import shards
from keras_dist_jax.sharding.logical_axes import LogicalAxes
from keras_dist_jax.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist_jax.sharding.sharded_optimizer import check_variables
from keras_dist_jax.sharding.shards import ReplicaShard
from keras_dist_jax.sharding.shards import Shards
from keras_dist_jax.sharding.supported import check_optimizer
from keras_dist_jax.updates import Updates

# The attribute of an optimizer with the one of its parts, and its `Sharding`.
_SHARDED = "_keras_dist_sharded"


class _SlotCreation(threading.local):
    # The variable for which this thread is making a slot.
    reference: Any = None


class Sharding:
    """Shards the variables that a plan says, and makes steps that use them."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self._plan = plan
        self.layout = layout
        self._axes = LogicalAxes(plan.layouts)
        self._creating = _SlotCreation()

    def shards_for(self, variable: keras.Variable) -> Shards | None:
        """Returns how devices divide a variable; `None` if each has it all."""
        if shards.is_sharded(variable):
            return shards.shards_of(variable)
        reference = self._creating.reference
        if reference is not None and self._plan.layouts is not None:
            self.keep_together(variable, reference)
        axes = self._axes.of(variable)
        over_replicas = self._plan.num_replicas > 1 and (
            shards.is_slot(variable)
            or (self._plan.shards_variables and shards.is_large(variable))
        )
        if not axes and not over_replicas:
            return None
        shape = tuple(variable.shape)
        return Shards(shape, self.layout, axes, over_replicas)

    def creating_beside(
        self, reference: keras.Variable | None
    ) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which a reference variable's slot is made."""
        return replaced(self._creating, reference=reference)

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        """Notes that an optimizer made a variable for a reference one."""
        self._axes.keep_together(variable, reference)
        is_alike = variable.shape == reference.shape
        if self._plan.shards_optimizer and is_alike:
            shards.mark_slot(variable)

    def shard_state(self, optimizer: keras.Optimizer) -> None:
        """Shards the variables that a built optimizer has for others."""
        trained = internals.trained_by(optimizer)
        # Those that were made outside of the scope have no axes yet.
        self._axes.match(optimizer.variables, trained)
        if not self._plan.shards_optimizer:
            for variable in optimizer.variables:
                self._split_slot(variable, trained)
            return
        check_optimizer(optimizer)
        check_variables(trained)
        shapes = {tuple(variable.shape) for variable in trained} - {()}
        for variable in optimizer.variables:
            if tuple(variable.shape) in shapes:
                shards.mark_slot(variable)
            self._split_slot(variable, trained)

    def _split_slot(
        self, variable: keras.Variable, trained: Sequence[keras.Variable]
    ) -> None:
        division = self.shards_for(variable)
        if division is not None:
            adopt_slot(variable, trained[0])
            shards.split(variable, division)

    def update_shards(self, variable: keras.Variable) -> Shards | None:
        """Returns how devices divide the update of a trained variable."""
        if self._plan.shards_optimizer:
            axes = self._axes.of(variable)
            return Shards(tuple(variable.shape), self.layout, axes)
        if shards.is_sharded(variable):
            return shards.shards_of(variable)
        return None

    def sharded(self, optimizer: keras.Optimizer) -> ShardedOptimizer:
        """Returns the optimizer of the parts of a function's replicas."""
        cached = vars(optimizer).get(_SHARDED)
        if (
            cached is None
            or cached[0] is not self
            or not cached[1].is_of(optimizer)
        ):
            made: list[Any] = []

            def make() -> None:
                made.append(ShardedOptimizer(optimizer, self._division))

            # Of the variables that it makes, only shapes and names are used.
            with refusing_variables(None):
                jax.eval_shape(make)
            cached = vars(optimizer)[_SHARDED] = self, made[0]
        sharded: ShardedOptimizer = cached[1]
        return sharded

    def _division(self, variable: keras.Variable) -> ReplicaShard:
        division, shape = self.update_shards(variable), tuple(variable.shape)
        is_over_replicas = division is not None and division.is_over_replicas
        return (
            division.replica_shard
            if division and is_over_replicas
            else ReplicaShard(shape, shape)
        )

    def step(
        self, model: keras.Model, step: StepFn, groups: Sequence[str]
    ) -> StepFn:
        """Makes a step of sharded state from one of whole variables."""
        known = weakref.ref(model)
        trains = "optimizer_variables" in groups
        if trains:
            self._axes.check_used()
            self._shard_built(internals.optimizers_of(model))

        def run(state: Any, data: Any) -> tuple[Any, Any]:
            model = known()
            assert model is not None
            optimizers = internals.optimizers_of(model) if trains else []
            self._shard_built(optimizers)
            owners = [internals.variables_of(model, name) for name in groups]
            old = [list(group) for group in state]
            if list(map(len, owners)) != list(map(len, old)):
                return step(state, data)
            given = [
                list(map(value_in, *pair))
                for pair in zip(owners, old, strict=True)
            ]
            updates = ConstrainedUpdates(self)
            gathering = _gathering(_is_traced(old))
            with updates.replacing(optimizers), gathering, scans.noting():
                outputs, new = step(tuple(map(list, given)), data)
            new = [list(group) for group in new]
            if list(map(len, new)) != list(map(len, old)):
                return outputs, new
            return outputs, [
                [
                    before
                    if value is seen
                    else array_in(owner, value, self.layout)
                    for owner, value, seen, before in zip(*columns, strict=True)
                ]
                for columns in zip(owners, new, given, old, strict=True)
            ]

        run.__name__ = step.__name__
        return run

    def update(
        self,
        optimizer: Any,
        state: list[keras.Variable],
        trained: Sequence[keras.Variable],
    ) -> Callable[..., Any]:
        """Makes a function of arrays and gradients that updates `state`."""
        known, layout = weakref.ref(optimizer), self.layout

        def update(arrays: Any, gradients: Any, rate: Any) -> Any:
            optimizer: Any = known()
            values = list(map(value_in, state, arrays))
            with internals.at_rate(optimizer, rate):
                written = self.applied(
                    optimizer, state, values, gradients, trained
                )
            return [
                array_in(v, written.get(id(v), before), layout)
                for v, before in zip(state, values, strict=True)
            ]

        return update

    def applied(
        self,
        optimizer: keras.Optimizer,
        state: Sequence[keras.Variable],
        values: Sequence[Any],
        gradients: Sequence[Any],
        trained: Sequence[keras.Variable],
    ) -> dict[int, Any]:
        """Returns the values that an update gives to variables, by id."""
        recording = Recording(zip(state, values, strict=True))
        with recording, ConstrainedUpdates(self).replacing([optimizer]):
            optimizer.apply(list(gradients), list(trained))
        return {id(v): value for v, value in recording.written}

    def _shard_built(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if optimizer.built:
                self.shard_state(optimizer)


def state_of(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Returns all variables that an update may read or write."""
    attributes = [
        value
        for value in vars(inner_of(optimizer)).values()
        if isinstance(value, keras.Variable)
    ]
    trained = internals.trained_by(optimizer)
    collected = [*optimizer.variables, *attributes, *trained, *variables]
    return list({id(variable): variable for variable in collected}.values())


class ConstrainedUpdates(Updates):
    """Updates of which each device computes its own part."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self._sharding = sharding

    def of_values(
        self, optimizer: Any, original: Any, state: Any, grads: Any, values: Any
    ) -> Any:
        trained = internals.trained_by(optimizer)
        if not len(trained) == len(grads) == len(values):
            return original(state, grads, values)  # raises
        with _gathering(False):
            new, state = original(
                state,
                [*map(self._part, trained, grads)],
                [*map(self._part, trained, values)],
            )
        return [*map(self._kept, trained, new)], state

    def of_variables(
        self, optimizer: Any, original: Any, grads: Any, variables: Any
    ) -> None:
        trained = internals.trained_by(optimizer, variables)
        with _gathering(False):
            for variable in trained:
                variable.assign(self._part(variable, variable.value))
            original([*map(self._part, trained, grads)], variables)
            for variable in trained:
                variable.assign(self._kept(variable, variable.value))

    def _part(self, variable: keras.Variable, value: object) -> Any:
        """Divides a variable's value or gradient as its update is."""
        if not isinstance(value, jax.core.Tracer):
            return value
        if not shards.is_sharded(variable):
            # The value is made whole first: else the compiler would also shard
            # the values that it is computed from.
            value = self._whole(value)
        division = self._sharding.update_shards(variable)
        return value if division is None else division.constrained(value)

    def _kept(self, variable: keras.Variable, value: object) -> Any:
        """Divides a variable's new value as the variable is."""
        if not isinstance(value, jax.core.Tracer):
            return value
        if shards.is_sharded(variable):
            return shards.shards_of(variable).constrained(value)
        return self._whole(value)

    def _whole(self, value: object) -> Any:
        whole = self._sharding.layout.replicated
        return jax.lax.with_sharding_constraint(value, whole)


class _Reading(threading.local):
    # Whether this thread traces a step in which the parts of replicas are
    # gathered.
    gathers = False


_reading = _Reading()


def _gathering(gathers: bool) -> contextlib.AbstractContextManager[None]:
    return replaced(_reading, gathers=gathers)


def is_in_step() -> bool:
    """Tells whether this thread traces a step of sharded variables."""
    return _reading.gathers


def _is_traced(nest: object) -> bool:
    leaves = jax.tree.leaves(nest)
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def used(variable: keras.Variable, value: object) -> Any:
    """Gathers a sharded variable where the step that is traced uses it.

    Its parts on logical devices stay there, and the gradient goes back to the
    parts.
    """
    if not (
        _reading.gathers
        and isinstance(value, jax.core.Tracer)
        and shards.is_sharded(variable)
    ):
        return value
    division = shards.shards_of(variable)
    with scans.at_read(value):
        parts = division.constrained(value)
        gathered = jax.lax.with_sharding_constraint(parts, division.used)
    return scans.note(gathered, parts, division)


def value_in(variable: keras.Variable, array: jax.Array) -> Any:
    """Returns a variable's value in a step, from the state's array."""
    if not shards.is_sharded(variable):
        return array
    division = shards.shards_of(variable)
    if isinstance(array, jax.core.Tracer):
        return division.whole(array)
    return division.placed(division.on_host(array, variable.path))


def array_in(variable: keras.Variable, value: object, layout: Layout) -> Any:
    """Returns the state's array of a new value, with its sharding."""
    sharding = layout.replicated
    is_traced = isinstance(value, jax.core.Tracer)
    if shards.is_sharded(variable):
        division = shards.shards_of(variable)
        if not is_traced:
            return division.put(value)
        value, sharding = division.stored(value), division.sharding
    if not is_traced:
        return value
    return jax.lax.with_sharding_constraint(value, sharding)
