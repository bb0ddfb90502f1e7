"""The executor that shards variables over devices."""

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.plugins import KeepsShards
from keras_dist.plugins import Plan
from keras_dist.plugins import Storage
from keras_dist.plugins import UpdatesShards
from keras_dist.plugins import with_gradients
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.cluster.workers import JaxWorkers
from keras_dist_jax.executors.executor import JaxExecutor
from keras_dist_jax.executors.replicas import JaxReplicas
from keras_dist_jax.fit.running import Running
from keras_dist_jax.fit.trainer import Trainer
from keras_dist_jax.functions.compiler import JaxCompiler
from keras_dist_jax.machine import jit
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.sharding import scans
from keras_dist_jax.sharding import shards
from keras_dist_jax.sharding.chiefs_requests import ChiefsRequests
from keras_dist_jax.sharding.initial_values import InitialValues
from keras_dist_jax.sharding.sharded_optimizer import check_gradients
from keras_dist_jax.sharding.sharded_steps import Sharding
from keras_dist_jax.sharding.sharded_steps import state_of
from keras_dist_jax.sharding.supported import rate_now
from keras_dist_jax.sharding.supported import settings_text
from keras_dist_jax.throttle import Throttle
from keras_dist_jax.variables.storage import JaxShardedStorage


class JaxShardedExecutor(JaxExecutor, KeepsShards):
    """The executor that shards some variables over the replicas."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        throttle: Throttle,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(plan, layout, throttle, workers)
        if plan.shards_variables:
            self.hooks = scans.WITH_SCANS
        self._sharding = Sharding(plan, layout)
        self._replicas = ShardedReplicas(
            layout, throttle, self._sharding, plan.first_replica, workers
        )

        assert isinstance(self.compiler, JaxCompiler)
        self.compiler.sharding = self._sharding
        self.initial_values = InitialValues(self._sharding, throttle, workers)

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        # Of a sharded variable, no device has the whole value: it is made on
        # the host.
        if self.plan.shards_variables or self.plan.layouts is not None:
            return self.layout.scope()
        return super().creation_scope()

    def storage(self, variable: keras.Variable) -> Storage:
        division = self._sharding.shards_for(variable)
        if division is None:
            return super().storage(variable)
        return JaxShardedStorage(variable, self.plan, self.layout, division)

    def creating_beside(
        self, reference: keras.Variable | None
    ) -> contextlib.AbstractContextManager[None]:
        return self._sharding.creating_beside(reference)

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        self._sharding.keep_together(variable, reference)

    def _trainer_of(self, model: keras.Model) -> Trainer:
        running = Running(model, self.layout, self.throttle)
        return Trainer(running, self._sharding.step)

    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> contextlib.AbstractContextManager[None]:
        sharded = list(filter(shards.is_sharded, variables))
        if self.workers is None or not sharded:
            return contextlib.nullcontext()
        assert isinstance(self.workers, JaxWorkers)
        return ChiefsRequests(self.workers, sharded).asked_or_served()

    written_by_chief = readable_by_chief


class ShardedReplicas(JaxReplicas, UpdatesShards):
    """Replicas whose optimizers update each part on its own device."""

    def __init__(
        self,
        layout: Layout,
        throttle: Throttle,
        sharding: Sharding,
        first: int = 0,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(layout, first, workers)
        self._throttle = throttle
        self._sharding = sharding
        # The programs of each optimizer.
        self._programs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def update_shards(
        self,
        optimizer: keras.Optimizer,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        layout = self._layout
        self._sharding.shard_state(optimizer)
        trained = internals.trained_by(optimizer, variables)
        everything = internals.trained_by(optimizer)
        check_gradients(optimizer, gradients[0], trained, everything)
        sums = self.sum_gradients(None, gradients, weights, trained)
        summed, trained = with_gradients(optimizer, sums, trained)
        state = state_of(optimizer, trained)
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
            update = self._sharding.update(optimizer, state, trained)
            programs[key] = jit(update, _named)
        arrays = self._throttle.run(
            programs[key],
            [*map(self._made_global, map(_array_of, state))],
            [*map(self._made_global, summed)],
            None if rate is None else np.asarray(rate, "float32"),
        )
        narrowed = list(map(layout.to_local, arrays))
        for variable, array in zip(state, narrowed, strict=True):
            if shards.is_sharded(variable):
                shards.give_back(variable, array)
            else:
                internals.set_array(variable, array)

    def _made_global(self, array: jax.Array) -> Any:
        if array is None or not array.is_fully_addressable:
            return array
        if isinstance(array.sharding, jax.sharding.NamedSharding) and (
            not array.is_fully_replicated
        ):
            return array
        return self._layout.to_global(self._layout.place(array))


def _named(arrays: object, gradients: object, rate: object) -> dict[str, Any]:
    """Names the arguments of an update."""
    return {"variables": arrays, "batch": [gradients, rate]}


def _array_of(variable: keras.Variable) -> Any:
    if shards.is_sharded(variable):
        return shards.stored(variable)
    return internals.array_of(variable)
