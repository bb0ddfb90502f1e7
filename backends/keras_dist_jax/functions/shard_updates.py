"""Updates in a replica function by which each replica updates its parts."""

from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_dist.plugins import Recording
from keras_dist.plugins import UpdatesShards
from keras_dist.plugins import with_gradients
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.functions.replica_trace import ReplicaTrace
from keras_dist_jax.functions.replica_trace import TracedRunner
from keras_dist_jax.programs.jaxprs import AXIS
from keras_dist_jax.sharding.sharded_steps import Sharding
from keras_dist_jax.sharding.shards import Shards
from keras_dist_jax.sharding.supported import is_elementwise


class ShardUpdates(TracedRunner, UpdatesShards):
    """The runner of replicas whose optimizers update sharded variables."""

    def __init__(self, trace: ReplicaTrace, sharding: Sharding) -> None:
        super().__init__(trace)
        self._sharding = sharding

    def update_shards(
        self,
        optimizer: keras.Optimizer,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        trained = internals.trained_by(optimizer, variables)
        local_gradients, trained = with_gradients(
            optimizer, gradients[0], trained
        )
        # Float8 layers overwrite some variables with their gradients.
        if not is_elementwise(optimizer) or any(
            getattr(variable, "overwrite_with_gradient", False)
            for variable in trained
        ):
            optimizer.apply(self.summed(local_gradients), trained)
            return
        sharded = self._sharding.sharded(optimizer)
        shards = [part.shards for part in sharded.parts]
        summed = self._scattered(
            sharded.aligned(local_gradients, trained), shards
        )
        state = [
            (v, sharded.parts_of(i).shards if sharded.is_sharded(i) else None)
            for i, v in enumerate(sharded.variables)
        ]
        count = len(state)
        state += zip(sharded.trainable_variables, shards, strict=True)
        values = [
            self._part(variable, division) for variable, division in state
        ]
        is_first = self._trace.index == 0
        # What each replica has whole counts once.
        counted = [
            True if division is not None else is_first
            for division, gradient in zip(shards, summed, strict=True)
            if gradient is not None
        ]
        totals = sharded.amounts(values[:count], summed, counted)
        if totals:
            totals = jax.lax.psum(totals, AXIS)
        new = sharded.updated(
            values[:count], summed, values[count:], totals, Recording
        )
        for (variable, division), before, value in zip(
            state, values, new, strict=True
        ):
            if value is not before:
                self._keep(variable, division, value)
        for variable in trained:
            if variable.constraint is not None:
                value = sharded.constrained(variable, totals)
                self._trace.write(variable, value)

    def _scattered(
        self, gradients: Sequence[Any], shards: Sequence[Shards | None]
    ) -> list[Any]:
        """Sums gradients over replicas, each where it is used."""
        pairs = [*zip(gradients, shards, strict=True)]
        whole = iter(
            self.summed([g for g, division in pairs if division is None])
        )
        return [
            next(whole)
            if division is None
            else gradient
            if gradient is None
            else division.scattered(self._trace.traced(gradient))
            for gradient, division in pairs
        ]

    def _part(self, variable: keras.Variable, division: Shards | None) -> Any:
        """Returns what this replica updates of a variable."""
        if division is None:
            return self._trace.read(variable)
        if self._trace.is_sharded(variable):
            return self._trace.part(variable)
        return division.own_shard(self._trace.read(variable))

    def _keep(
        self, variable: keras.Variable, division: Shards | None, value: object
    ) -> None:
        if division is None:
            self._trace.write(variable, value)
        elif self._trace.is_sharded(variable):
            self._trace.write_shard(variable, value)
        else:
            self._trace.write(variable, division.gathered(value))
