"""Replicas as threads of one process, under Keras' own trainer."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import torch

from keras_dist.core.plan import Plan
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import Share
from keras_dist.core.rows import UnequalLengths
from keras_dist.core.rows import bounds
from keras_dist.core.rows import ranges
from keras_dist.errors import DeviceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.replica import SEED_STRIDE
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.plugin.replica import group_of
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist.plugin.runner import StepRunner
from keras_dist.plugin.threads import BatonPool
from keras_dist.plugin.threads import Round
from keras_dist.replica.state import ReplicaState
from keras_dist.replica.state import outside_replicas
from keras_dist_torch import transfers
from keras_dist_torch.batches import count_rows
from keras_dist_torch.batches import cut
from keras_dist_torch.batches import lengths_of
from keras_dist_torch.batches import move
from keras_dist_torch.buckets import Overlap
from keras_dist_torch.derivatives import Derivatives
from keras_dist_torch.gradients import AllSum
from keras_dist_torch.gradients import install
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.hooks import check_hooks
from keras_dist_torch.keras_internals import TorchModuleWrapper
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.one_device import TorchExecutor
from keras_dist_torch.one_device import keras_device
from keras_dist_torch.one_device import torch_device
from keras_dist_torch.threads import capture_thread
from keras_dist_torch.transfers import Transfers
from keras_dist_torch.workers import TorchWorkers

T = TypeVar("T")
# Meetings and transfers, which `torch.compile` must not trace.
_meet: Callable[..., Any] = torch._dynamo.disable(Round.meet)
_all_sum: Callable[..., Any] = torch._dynamo.disable(AllSum.apply)
_delivered: Callable[..., Any] = torch._dynamo.disable(Transfers.read)


class TorchReplicaExecutor(TorchExecutor, StepRunner):
    """Runs each step of a model once on each replica.

    Replicas on the variables' device read the same memory; those on another
    device read a copy made at the first read in each step. The update happens
    once, on the device of the variables.
    """

    workers: TorchWorkers | None

    def __init__(self, plan: Plan, workers: TorchWorkers | None = None) -> None:
        super().__init__(plan, workers)
        _check_memory(plan)
        install()
        self._devices = [torch_device(device) for device in plan.devices]
        self._are_away = [
            transfers.are_apart(device, plan.primary) for device in plan.devices
        ]
        self._open: set[Transfers] = set()
        self._unequal = UnequalLengths()
        # `torch.compile` must not trace threads.
        self._play = torch._dynamo.disable(BatonPool(capture_thread).run)

    @property
    def replicas(self) -> ReplicaRunner:
        return self

    def prepare(self, model: keras.Model) -> None:
        for layer in model._flatten_layers():
            if isinstance(layer, TorchModuleWrapper):
                raise UnsupportedModelError(
                    f"Layer '{layer.name}' wraps a torch.nn.Module, whose "
                    "parameters replicas would share. Expected: Keras layers. "
                    "Use one device, or write it with Keras layers."
                )

    def run(
        self,
        fn: Callable[[Replica, Any], T],
        batch: Any,
        is_whole: bool = False,
    ) -> list[T]:
        rows, alike = count_rows(batch)
        if not alike and self.plan.num_replicas > 1:
            self._unequal.tell(lengths_of(batch), on_each=False)
        alike = alike and not is_whole
        edges = self._edges(rows, alike)
        group = group_of(self.plan, self.workers, edges)
        first = self.plan.first_replica
        parts = list(zip(edges[:-1], edges[1:], strict=True))[
            first : first + self.plan.num_local_replicas
        ]
        round_members = [
            (index, start, stop)
            for index, (start, stop) in enumerate(parts)
            if stop > start
        ]
        # A worker without rows runs one replica, with weight 0.
        round_members = round_members or [(0, 0, 0)]
        round_ = Round(len(round_members))
        shares = [Share(stop - start, rows) for _, start, stop in round_members]
        overlap = None
        if self.workers is not None:
            weights = [share.weight for share in shares]
            device = torch_device(self.plan.primary)
            overlap = Overlap(self.workers, device, weights)
        members = [index for index, _, _ in round_members]
        with self._transfers(members) as moved, self._own_randomness():
            fns = []
            for position, (index, start, stop) in enumerate(round_members):
                replica = self._replica(
                    *(index, shares[position], round_, position, group),
                    moved,
                    overlap,
                )
                own = slice(start, max(stop, 1)) if alike else slice(None)
                part = cut(batch, own, self._devices[index])
                fns.append(
                    functools.partial(self._on_device, index, fn, replica, part)
                )
            results: list[T] = self._play(round_, fns)
        if overlap is not None:
            overlap.close()
        return results

    def rows_in_fit(self, batch: Any) -> list[range]:
        return ranges(self._edges(*count_rows(batch)))

    def _edges(self, rows: int, alike: bool) -> list[int]:
        """Returns each global replica's first row and, at the end, `rows`.

        If arrays differ in length, the batch axis is ambiguous: replica 0 gets
        everything.
        """
        edges = bounds(rows, self.plan.num_replicas) if alike else [0]
        return edges + [rows] * (self.plan.num_replicas + 1 - len(edges))

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Seeds torch's global generators differently on each worker, inside.

        Keras draws masks of dropout from them. Outside, their states stay
        equal on all workers, so that all shuffle alike.
        """
        if self.workers is None:
            yield
            return
        gpus = [d.index for d in self._devices if d.type == "cuda"]

        def states() -> list[torch.Tensor]:
            of_gpus = [torch.cuda.get_rng_state(index) for index in gpus]
            return [torch.get_rng_state(), *of_gpus]

        with torch.random.fork_rng(devices=gpus):
            seed = int(torch.randint(2**62, ()))
            seed += SEED_STRIDE * self.plan.first_replica
            # Not `torch.manual_seed`: it records the caller's stack once for
            # each kind of accelerator that is not there.
            torch.default_generator.manual_seed(seed)
            for index in gpus:
                torch.cuda.default_generators[index].manual_seed(seed)
            before = states()
            yield
            is_used = not all(map(torch.equal, before, states()))
        if is_used:
            # Gives the next step another seed. A step that draws nothing
            # leaves the generator as one device would.
            torch.randint(2**62, ())

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        count = self.plan.num_local_replicas
        group = ReplicaGroup(self.workers, self.plan.first_replica)
        round_ = Round(count)
        with self._transfers(range(count)) as moved, self._own_randomness():
            fns = [
                functools.partial(
                    self._on_device,
                    index,
                    fn,
                    self._replica(index, WHOLE, round_, index, group, moved),
                )
                for index in range(count)
            ]
            results: list[T] = self._play(round_, fns)
        return results

    @contextlib.contextmanager
    def _transfers(self, members: Sequence[int]) -> Iterator[Transfers | None]:
        """Opens the transfers of a round, `None` if devices share memory."""
        if not any(self._are_away):
            yield None
            return
        moved = Transfers(
            torch_device(self.plan.primary),
            [
                self._devices[index] if self._are_away[index] else None
                for index in members
            ],
        )
        self._open.add(moved)
        try:
            yield moved
        finally:
            self._open.discard(moved)
            moved.close(may_pack=not self._open)

    def _replica(
        self,
        index: int,
        share: Share,
        round_: Round,
        position: int,
        group: ReplicaGroup,
        moved: Transfers | None,
        overlap: Overlap | None = None,
    ) -> Replica:
        primary = torch_device(self.plan.primary)
        return TorchReplica(
            index,
            share,
            group,
            self._devices[index],
            round_,
            position,
            meeting_place=str(primary),
            one_device={primary, *self._devices} == {primary},
            moved=moved,
            overlap=overlap,
        )

    def _on_device(self, index: int, fn: Callable[..., T], *args: Any) -> T:
        with keras_device(self.plan.devices[index]):
            return fn(*args)

    def probing(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = torch.no_grad()
        return context

    def rehearsing(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = torch.enable_grad()
        return context

    def building(self) -> contextlib.AbstractContextManager[Any]:
        return self.creation_scope()

    def weighted_sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> list[Any]:
        return weighted_sum(gradients, weights, torch_device(self.plan.primary))

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        assert isinstance(replica, TorchReplica)
        here = gradients
        if replica.moved is not None:
            here = replica.moved.bring_back(gradients)
        own = self.weighted_sum(here, weights)
        if self.workers is None:
            return own
        device = torch_device(self.plan.primary)
        overlap = replica.overlap or Overlap(self.workers, device)
        return overlap.sum(gradients, own, variables)


class TorchReplica(Replica):
    """One replica on one thread.

    It keeps no tensors, because autograd nodes keep it alive.
    """

    def __init__(
        self,
        index: int,
        share: Share,
        group: ReplicaGroup,
        device: torch.device,
        round_: Round,
        position: int,
        meeting_place: str,
        one_device: bool,
        moved: Transfers | None,
        overlap: Overlap | None = None,
    ) -> None:
        super().__init__(index, share, group)
        self.moved = moved
        self.overlap = overlap
        self.derivatives = Derivatives()
        self._meeting_place = meeting_place
        self._one_device = one_device
        self._device = device
        self._round = round_
        self._position = position

    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        def hold(values: list[Any]) -> T:
            if self.moved is not None:
                self.moved.wait()
            with (
                outside_replicas(),
                torch.no_grad(),
                keras.device(self._meeting_place),
            ):
                return fn(values)

        result: T = _meet(self._round, self._position, what, hold, value)
        if self._one_device:
            return result
        return move(result, self._device)

    def all_sum(
        self,
        what: str,
        value: torch.Tensor,
        total: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result: torch.Tensor = _all_sum(value, self, what, total)
        return result

    def read(self, variable: keras.Variable) -> torch.Tensor | None:
        parameter = parameter_of(variable)
        if parameter is None:
            return None
        check_hooks(variable, parameter)
        sent = None
        if self.moved is not None:
            sent = _delivered(self.moved, self._position, variable)
        value = parameter.detach() if sent is None else sent.detach()
        value.requires_grad_(variable.trainable)
        if self.overlap is not None and variable.trainable:
            self.overlap.watch(variable, value, self._position)
        return value

    def has_changed(
        self,
        state: ReplicaState,
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> bool:
        return self.derivatives.are_changed(gradients)

    def hold(self, variable: keras.Variable, value: Any) -> torch.Tensor:
        held: torch.Tensor = value.detach()
        if variable.trainable:
            return held.clone().requires_grad_()
        return held


def _check_memory(plan: Plan) -> None:
    """Refuses variables on several memories, which one update would mix.

    Raises:
        DeviceError: If parameter devices have separate memories.
    """
    if (
        plan.is_central
        and len(set(map(torch_device, plan.variable_devices))) > 1
    ):
        names = ", ".join(str(device) for device in plan.variable_devices)
        raise DeviceError(
            "On PyTorch, variables with one copy share one memory, because an "
            "optimizer updates them together. Received: "
            f"parameter_device={names}. Expected: one GPU, or CPU devices."
        )
