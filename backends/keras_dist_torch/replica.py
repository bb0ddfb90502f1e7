"""One replica of a run, on a thread of its own, and its rows of a batch."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from typing import TypeVar

import keras
import torch

from keras_dist.plugins import Draw
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import Round
from keras_dist.plugins import RowShard
from keras_dist.plugins import current_replica
from keras_dist.plugins import is_row_shaped
from keras_dist.plugins import leaves_of
from keras_dist.plugins import map_nest
from keras_dist.plugins import outside_replicas
from keras_dist_torch import prefetch
from keras_dist_torch.buckets import Overlap
from keras_dist_torch.draws import Draws
from keras_dist_torch.draws import ReplicaDraws
from keras_dist_torch.gradients import AllSum
from keras_dist_torch.gradients import refuse_hooks
from keras_dist_torch.gradients import refuse_in_place
from keras_dist_torch.keras_internals import on_device
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.look import Look
from keras_dist_torch.transfers import Transfers

T = TypeVar("T")
# Rendezvous and transfers, which `torch.compile` must not trace.
_all_sum: Callable[..., Any] = torch._dynamo.disable(AllSum.apply)
_delivered: Callable[..., Any] = torch._dynamo.disable(Transfers.read)


@dataclass(frozen=True)
class Run:
    """The things that the replicas of one run have in common."""

    round: Round
    group: ReplicaGroup
    primary: torch.device  # of the variables, where replicas meet
    is_only: bool  # whether there is one replica
    is_one_device: bool
    moved: Transfers | None
    overlap: Overlap | None
    draws: Draws
    look: Look | None  # at a step, to compile it


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _meet(
    run: Run, position: int, what: str, hold: Callable[..., T], value: object
) -> T:
    if run.is_only:
        return hold([value])
    result: T = run.round.rendezvous(position, what, hold, value)
    return result


class BaseReplica(Replica):
    """The base of replicas, on threads or not."""

    draws: ReplicaDraws  # set when it begins

    def draw(self, draw: Draw) -> Any:
        return self.draws.draw(draw)

    def all_sum(
        self,
        what: str,
        value: torch.Tensor,
        total: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _all_sum(value, self, what, total)

    @property
    def look(self) -> Look | None:
        """The look at the step that runs, to compile it."""
        return None


class TorchReplica(BaseReplica):
    """One replica on a thread; it keeps no tensors, as autograd keeps it."""

    def __init__(
        self,
        index: int,
        share: RowShard,
        position: int,
        device: torch.device,
        run: Run,
    ) -> None:
        super().__init__(index, share, run.group)
        self.is_only = run.is_only
        self.moved = run.moved
        self.overlap = run.overlap
        self._position = position
        self.assigned: Assigned | None = None
        # By the id of a variable, how often its tensor had been changed.
        self._versions: dict[int, int] = {}
        self._device = device
        self._run = run
        self.draws = ReplicaDraws(self, run.draws, device)

    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: object
    ) -> T:
        run = self._run
        if run.look is not None:
            run.look.meets(what)

        def hold(values: list[Any]) -> T:
            if run.moved is not None:
                run.moved.wait()
            with (
                outside_replicas(),
                torch.no_grad(),
                on_device(run.primary),
            ):
                run.draws.compare(run.group.workers)
                return fn(values)

        result: T = _meet(run, self._position, what, hold, value)
        return result if run.is_one_device else move(result, self._device)

    @property
    def look(self) -> Look | None:
        return self._run.look

    @property
    def seed_offset(self) -> Any:
        if self.look is not None:
            self.look.draws(is_compilable=False)
        return super().seed_offset

    def at_home(self, value: Any) -> Any:
        return value.to(self._run.primary)

    def read(self, variable: keras.Variable) -> torch.Tensor | None:
        parameter = parameter_of(variable)
        if parameter is None:
            return None
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            refuse_hooks(variable, parameter)
        sent = None
        if self.moved is not None:
            sent = _delivered(self.moved, self._position, variable)
        value = parameter.detach() if sent is None else sent.detach()
        self._versions[id(variable)] = value._version
        if not variable.trainable:
            return value
        value.requires_grad_()
        if self.overlap is not None:
            self.overlap.watch(variable, value, self._position)
        return value

    def check_values(self, model: keras.Model, values: dict[int, Any]) -> None:
        if self.is_only:
            return  # The tensors are this process' own.
        for key, version in self._versions.items():
            value = values.get(key)
            if value is not None and value._version != version:
                refuse_in_place(model, key)

    def hold(self, variable: keras.Variable, value: Any) -> torch.Tensor:
        tensor = value.detach()
        self._versions.pop(id(variable), None)
        if not variable.trainable:
            return tensor
        leaf = tensor.clone().requires_grad_()
        if self.assigned is not None:
            self.assigned.append((variable, leaf))
        return leaf


Assigned = list[tuple[keras.Variable, torch.Tensor]]


@contextlib.contextmanager
def noting_assigned() -> Iterator[Assigned]:
    """Yields a list of the leaves that this thread's replica makes of values
    which it assigns, while it is differentiated."""
    state = current_replica()
    replica = None if state is None else state.replica
    made: Assigned = []
    if not isinstance(replica, TorchReplica):
        yield made
        return
    around, replica.assigned = replica.assigned, made
    try:
        yield made
    finally:
        replica.assigned = around
        if around is not None:
            around += made


def lengths_of(batch: object) -> list[int]:
    """Returns the numbers of rows of a batch's arrays, one at least."""
    lengths = [
        int(leaf.shape[0]) for leaf in leaves_of(batch) if is_row_shaped(leaf)
    ]
    if not lengths:
        raise ValueError(
            "A batch must hold at least one array with rows along axis 0. "
            f"Received: {batch!r}."
        )
    return lengths


def cut(batch: object, rows: slice, device: torch.device) -> Any:
    """Takes some rows of a batch and moves them to a device."""

    def part(leaf: Any) -> Any:
        selected = leaf[rows] if is_row_shaped(leaf) else leaf
        if not isinstance(selected, torch.Tensor):
            return selected
        # `data`, because slices of one tensor share a version counter: autograd
        # would take an in-place change of one, as Keras makes to weights, for
        # a change of the others.
        return prefetch.sent(selected.data, device)

    return map_nest(part, batch)


def move(value: T, device: torch.device) -> T:
    def moved(leaf: object) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            return leaf.to(device)
        return leaf

    result: T = map_nest(moved, value)
    return result
