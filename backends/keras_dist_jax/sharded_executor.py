"""The executor of plans with an optimizer's state sharded over the replicas."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core.plan import Plan
from keras_dist.internals.keras_internals import with_gradients
from keras_dist.plugin.home import Home
from keras_dist.plugin.powers import KeepsParts
from keras_dist.plugin.powers import UpdatesParts
from keras_dist.sharding.sharded_optimizer import check_gradients
from keras_dist_jax import keras_internals as internals
from keras_dist_jax import shards
from keras_dist_jax.executor import JaxExecutor
from keras_dist_jax.gate import Gate
from keras_dist_jax.layout import Layout
from keras_dist_jax.placement import SlotHome
from keras_dist_jax.replicas import JaxReplicas
from keras_dist_jax.running import Running
from keras_dist_jax.sharded import EagerUpdate
from keras_dist_jax.sharded import shard_state
from keras_dist_jax.sharded import sharded_step
from keras_dist_jax.trainer import Trainer
from keras_dist_jax.workers import JaxWorkers


class JaxShardedExecutor(JaxExecutor, KeepsParts):
    """The executor that shards the variables of optimizers.

    A compiled function joins the parts of the variables that it uses, for as
    long as it runs.
    """

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
                value = shards.on_host(variable, shards.stored(variable))
                if self.plan.is_chief:
                    shards.hold(variable, value)
            yield
        finally:
            for variable in chosen:
                shards.let_go(variable)

    @contextlib.contextmanager
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = self._over_workers(variables)
        with self.readable_by_chief(chosen):
            yield
            for variable in chosen:
                value = shards.let_go(variable)
                if value is None:  # of another worker
                    value = shards.empty_like(variable)
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
        self._updates: weakref.WeakKeyDictionary[Any, EagerUpdate] = (
            weakref.WeakKeyDictionary()
        )

    def update_parts(
        self,
        optimizer: Any,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        shard_state(optimizer, self._layout)
        if optimizer not in self._updates:
            self._updates[optimizer] = EagerUpdate(
                optimizer, self._layout, self._gate
            )
        trained = internals.trained_by(optimizer, variables)
        check_gradients(
            optimizer, gradients[0], trained, internals.trained_by(optimizer)
        )
        sums = self.sum_gradients(None, gradients, weights, trained)
        summed, trained = with_gradients(optimizer, sums, trained)
        for variable, array in self._updates[optimizer](summed, trained):
            if shards.is_sharded(variable):
                shards.give_back(variable, array)
            else:
                internals.set_array(variable, array)
