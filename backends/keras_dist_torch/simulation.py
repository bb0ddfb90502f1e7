"""One worker of many, whose step computes no values and sends nothing."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.core.rows import Share
from keras_dist.internals import keras_saveables
from keras_dist.plugin.bodies import NO_BODY
from keras_dist.plugin.bodies import Body
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.recorder import Call
from keras_dist.plugin.targets import CompiledProgram
from keras_dist.plugin.workers import Workers
from keras_dist_torch.direct import TorchDirectExecutor
from keras_dist_torch.draws import States
from keras_dist_torch.fake_internals import FakeStore
from keras_dist_torch.fake_internals import with_values
from keras_dist_torch.measuring import Collectives
from keras_dist_torch.measuring import Measured
from keras_dist_torch.parts import tensor_in_use
from keras_dist_torch.sums import Sum
from keras_dist_torch.workers import TorchWorkers


class SimulatedWorkers(TorchWorkers):
    """Workers that are not here: all of them would do what this one does."""

    have_values = False

    def __init__(self, cluster: Cluster, options: CommunicationOptions) -> None:
        # Without a network, nothing else of `TorchWorkers` can be made.
        Workers.__init__(self, cluster, options)
        self._is_nccl = self._is_aborted = False
        self.store = FakeStore()
        self.collectives = Collectives(cluster.num_workers)

    @property
    def scatter_of_fsdp(self) -> None:
        """FSDP's own way is what targets of GPUs take."""

    def check_fsdp(self, device_type: str) -> None:
        """Targets of several GPUs have NCCL."""

    def group_name(self) -> str:
        return "fake"  # which `FakeStore`'s module has registered

    def start_sum(self, flat: torch.Tensor) -> Any:
        self.collectives.add("all-reduce", flat.nbytes)
        return lambda: None

    def gather_alike(self, tensors: Sequence[Any]) -> list[list[Any]]:
        count = self.cluster.num_workers
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.collectives.add("all-gather", count * num_bytes)
        return [[each.clone() for each in tensors] for _ in range(count)]

    def gather_rows(
        self, tensors: Sequence[Any], shares: Sequence[Share]
    ) -> list[list[Any]]:
        sizes = torch.empty(len(tensors), dtype=torch.int32)
        everyone = self.gather([*tensors, sizes])
        most = shares[0].rows  # of this worker
        return [
            [t[: share.rows] if t.shape[:1] == (most,) else t for t in each]
            for (*each, _), share in zip(everyone, shares, strict=True)
        ]

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors)

    def exchange(
        self, call: Call, head: bytes, body: Body = NO_BODY
    ) -> tuple[list[bytes], None]:
        return [head] * self.cluster.num_workers, None

    def sum_expected(self, own: Sum, last: torch.Tensor) -> None:
        self.start_sum(last)()

    def leave(self, reason: str, failed: bool) -> None:
        """There is nobody to leave."""


class SimulatedExecutor(TorchDirectExecutor):
    """Runs one replica of many on tensors without values."""

    workers: SimulatedWorkers

    def __init__(self, plan: Plan, workers: TorchWorkers) -> None:
        assert isinstance(workers, SimulatedWorkers)
        with with_values():
            super().__init__(plan, workers)

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[States]:
        yield []

    def _are_present(self, own: list[Any], counts: torch.Tensor) -> list[bool]:
        return [gradient is not None for gradient in own]

    def simulated_step(self, model: keras.Model, batch: Any) -> CompiledProgram:
        """Runs two steps of `fit` for a described batch; measures the second.

        The first one makes what later steps have.
        """
        start = time.monotonic()
        data = keras.tree.map_structure(
            lambda leaf: keras.ops.empty(leaf.shape, leaf.dtype), batch
        )
        bound(model).strategy.has_run = True  # as in `fit`
        with self.execution_scope():
            model.train_step(data)
            collectives = Collectives(self.plan.num_workers)
            self.workers.collectives = collectives
            found = measured_step(model, data, collectives)
        seconds = time.monotonic() - start
        return dataclasses.replace(found, seconds=seconds)


def measured_step(
    model: keras.Model, data: Any, collectives: Collectives
) -> CompiledProgram:
    """Runs a step of `fit`, and returns what it did on this worker."""
    state, rows = _state_of(model), keras.tree.flatten(data)
    kept = [each for own in state.values() for each in own]
    flops = FlopCounterMode(display=False)
    with flops, Measured(collectives, [*kept, *rows]) as measured:
        model.train_step(data)
    of_kept, of_rows = _num_bytes(kept), _num_bytes(rows)
    return CompiledProgram(
        name="train_step",
        devices=collectives.devices,
        on_host=False,
        state={name: _num_bytes(own) for name, own in state.items()},
        received={},
        batch=of_rows,
        flops=flops.get_total_flops(),
        aliased=of_kept,
        temporary=measured.peak - of_kept - of_rows,
        peak=measured.peak,
        collectives=collectives.found(),
        is_simulated=True,
    )


def _state_of(model: keras.Model) -> dict[str, list[torch.Tensor]]:
    """Returns what this worker has of a model's variables, by group."""
    optimizers = keras_saveables.all_optimizers(model).values()
    groups = {
        "optimizer": [v for each in optimizers for v in each.variables],
        "metrics": [*keras_saveables.metric_variables(model).values()],
        "trainable": model.trainable_variables,
        "non-trainable": keras_saveables.all_variables(model),
    }
    known: set[int] = set()
    found = {}
    for name, variables in groups.items():
        own = {id(v): _own(v) for v in variables if id(v) not in known}
        known |= own.keys()
        found[name] = [*own.values()]
    return found


def _own(variable: keras.Variable) -> torch.Tensor:
    tensor = tensor_in_use(variable)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
