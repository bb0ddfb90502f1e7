"""The executor of plans with an optimizer's state cut over the replicas."""

import contextlib
import functools
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.plugin.powers import KeepsParts
from keras_dist.plugin.powers import UpdatesParts
from keras_dist_jax import cut
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.executor import JaxExecutor
from keras_dist_jax.gate import Gate
from keras_dist_jax.layout import Layout
from keras_dist_jax.part_updates import part_update_of
from keras_dist_jax.replicas import JaxReplicas
from keras_dist_jax.running import Running
from keras_dist_jax.sharded import ShardedSteps
from keras_dist_jax.trainer import Trainer
from keras_dist_jax.workers import JaxWorkers


class JaxShardedExecutor(JaxExecutor, KeepsParts):
    """The executor that cuts the variables of optimizers over the replicas.

    `fit` and `optimizer.apply` in `strategy.run` update parts where they are. A
    compiled function joins the parts of the variables that it uses for as long
    as it runs: its gradients are reduced whole, it updates whole variables, and
    only parts of them are kept.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        gate: Gate,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(plan, layout, gate, workers)
        self.owners = cut.OptimizerSlots(plan.variable_devices)
        self._replicas = ShardedReplicas(
            layout, gate, plan.first_replica, workers
        )

    def place(self, variable: keras.Variable) -> None:
        if cut.is_marked(variable):
            cut.cut(variable, self.layout)
        super().place(variable)

    def devices_of(self, variable: keras.Variable) -> tuple[Device, ...]:
        if cut.is_cut(variable):
            return self.plan.variable_devices
        return super().devices_of(variable)

    def bytes_on(self, variable: keras.Variable) -> dict[Device, int]:
        if not cut.is_cut(variable):
            return super().bytes_on(variable)
        return dict.fromkeys(
            self.plan.variable_devices, cut.bytes_of_part(variable)
        )

    def trainer_of(self, running: Running) -> Trainer:
        make = functools.partial(ShardedSteps, layout=self.layout)
        return Trainer(running, make)

    @contextlib.contextmanager
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = self._cut_over_workers(variables)
        try:
            for variable in chosen:
                value = cut.on_host(variable, cut.stored(variable))
                if self.plan.is_chief:
                    cut.hold(variable, value)
            yield
        finally:
            for variable in chosen:
                cut.let_go(variable)

    @contextlib.contextmanager
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = self._cut_over_workers(variables)
        with self.readable_by_chief(chosen):
            yield
            for variable in chosen:
                value = cut.let_go(variable)
                if value is None:  # of another worker
                    value = cut.empty_like(variable)
                assert self.workers is not None
                (value,) = self.workers.broadcast([value])
                internals.set_array(variable, value)

    def _cut_over_workers(
        self, variables: Sequence[keras.Variable]
    ) -> list[keras.Variable]:
        if self.workers is None:
            return []
        return [variable for variable in variables if cut.is_cut(variable)]


class ShardedReplicas(JaxReplicas, UpdatesParts):
    """Replicas whose optimizers update each part on its own device.

    `first` is the position of this worker's first replica among all.
    """

    def __init__(
        self,
        layout: Layout,
        gate: Gate,
        first: int = 0,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(layout, first, workers)
        self._gate = gate

    def update_parts(
        self,
        optimizer: Any,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        update = part_update_of(optimizer, self._layout)
        sharded = update.sharded
        found = sharded.checked(
            self.weighted_sum(gradients, weights), variables
        )
        trained, state = sharded.trainable_variables, sharded.variables
        values = [
            cut.stored(v) if cut.is_cut(v) else internals.array_of(v)
            for v in state
        ]
        with self._gate.lock:
            self._gate.settle(None)
            new, kept = update.eagerly(
                found, [*map(internals.array_of, trained)], values
            )
            self._gate.enter(None, new[0])
        for variable, array in zip(
            [*trained, *state], [*new, *kept], strict=True
        ):
            if cut.is_cut(variable):
                cut.give_back(variable, array)
            else:
                internals.set_array(variable, array)
