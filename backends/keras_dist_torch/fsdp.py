"""The executor for sharded variables: one replica in each worker."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_dist.plugins import Places
from keras_dist.plugins import Plan
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import adopt
from keras_dist.plugins import in_packs
from keras_dist.plugins import lend_global_seed
from keras_dist.plugins import named
from keras_dist.plugins import outside_replicas
from keras_dist_torch.draws import Draws
from keras_dist_torch.draws import ReplicaDraws
from keras_dist_torch.fsdp_internals import reset
from keras_dist_torch.fsdp_replica import FSDPReplica
from keras_dist_torch.fsdp_replica import sharded
from keras_dist_torch.keras_internals import own_variables
from keras_dist_torch.one_device import torch_device
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.sharded import ShardedExecutor
from keras_dist_torch.shards import DTensorStorage
from keras_dist_torch.shards import is_large
from keras_dist_torch.shards import is_sharded
from keras_dist_torch.shards_hooks import HOOKS
from keras_dist_torch.shards_hooks import preparing
from keras_dist_torch.units import new_layers
from keras_dist_torch.units import shard_layers
from keras_dist_torch.workers import TorchWorkers

T = TypeVar("T")


class FSDPExecutor(ShardedExecutor):
    """Runs one replica a worker, on sharded variables."""

    hooks = HOOKS
    # A plain model would update copies.
    shares_layers = False

    def __init__(self, plan: Plan, workers: TorchWorkers) -> None:
        workers.check_fsdp(torch_device(plan.primary).type)
        super().__init__(plan, workers)

    def _divides(self, variable: keras.Variable) -> bool:
        is_new = type(variable) is keras.Variable and variable.trainable
        return super()._divides(variable) or (is_new and is_large(variable))

    def prepare(self, model: keras.Model) -> None:
        super().prepare(model)
        if model.built:
            self._split_weights(model)
            shard_layers(model, self._mesh, self.workers.scatter_of_fsdp)

    def _split_weights(self, model: keras.Model) -> None:
        """Divides large weights that were not trained when they were made.

        Of numbers along one axis, such as moving averages, each worker has all.
        """
        for layer in new_layers(model):
            for variable in own_variables(layer):
                is_known = is_sharded(variable) or not is_large(variable)
                if is_known or sum(size > 1 for size in variable.shape) < 2:
                    continue
                TorchRecord.of(variable).is_marked = True
                adopt(variable)
                self.storage(variable).place()

    def recover(self, model: keras.Model) -> None:
        reset(model)

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        called: list[keras.Model] = []

        def prepare(model: keras.Model) -> None:
            called.append(model)
            if new_layers(model):
                with outside_replicas():
                    self.prepare(model)

        try:
            # All workers call the same models, and share their layers then.
            # Compiled functions run as they are, with FSDP's hooks.
            plainly = torch.compiler.set_stance("force_eager")
            with preparing(prepare), plainly:
                return super().call(fn)
        except BaseException:
            for model in called:
                self.recover(model)
            raise

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _play(
        self,
        fn: Callable[..., T],
        members: Sequence[tuple[Any, ...]],
        group: ReplicaGroup,
        overlap: object = None,
        places: Places | None = None,
        may_repeat: bool = False,
    ) -> list[T]:
        # Not compiled, because FSDP has hooks.
        ((_, share, *args),) = members
        replica = FSDPReplica(share, group)
        place = named(replica.id, self.plan.num_replicas)
        lend_global_seed()
        try:
            with place, self._own_randomness() as states:
                draws = Draws(1, states, places, may_repeat)
                replica.draws = ReplicaDraws(replica, draws, self._primary)
                results = [self._on_device(fn, replica, *args)]
                draws.end()
            return results
        finally:
            replica.close()

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        assert isinstance(replica, FSDPReplica)
        self.workers.check()  # FSDP does not, and gradients are used next
        ((given,), (weight,)) = gradients, weights
        local_gradients = [sharded(gradient) for gradient in given]
        replica.trains(variables)
        # Gradients that no backward pass has computed have no weight yet.
        factor = 1.0 if replica.has_gradients else weight
        places = [
            place
            for place, gradient in enumerate(local_gradients)
            if not isinstance(gradient, DTensor)
        ]
        rest = [variables[place] for place in places]
        return in_packs(
            lambda some: self._summed(some, rest, factor),
            [places],
            local_gradients,
        )

    def carries(self, variables: Sequence[keras.Variable]) -> bool:
        return False  # FSDP sends most gradients

    def _summed(
        self,
        gradients: list[Any],
        variables: Sequence[keras.Variable],
        factor: float,
    ) -> list[Any]:
        """Sums gradients over workers, `None` where no worker has one."""
        if not gradients:
            return []
        flags = torch.tensor([float(g is not None) for g in gradients])
        filled = [
            torch.zeros(tuple(variable.shape), device=self._primary)
            if gradient is None
            else gradient * factor
            for variable, gradient in zip(variables, gradients, strict=True)
        ]
        *sums, counts = self.workers.sum([*filled, flags.to(self._primary)])
        return [
            self._in_parts(total, variable) if count > 0 else None
            for total, variable, count in zip(
                sums, variables, counts.tolist(), strict=True
            )
        ]

    def _in_parts(self, total: torch.Tensor, variable: keras.Variable) -> Any:
        storage = self.storage(variable)
        if not isinstance(storage, DTensorStorage):
            return total
        return storage.split(total).detach()
