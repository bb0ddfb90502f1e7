"""Sharded optimizer state: each replica keeps and updates a part of it."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import cast

import keras
import torch

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_optimizers import WITH_APPLY
from keras_dist.plugin.front_end import HOOKS
from keras_dist.plugin.home import Home
from keras_dist.plugin.home import ShardedHome
from keras_dist.plugin.powers import KeepsParts
from keras_dist.plugin.powers import UpdatesParts
from keras_dist.replica.state import current_replica
from keras_dist.sharding.sharded_optimizer import Parts
from keras_dist.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.one_device import keras_device
from keras_dist_torch.pieces import LocalParts
from keras_dist_torch.pieces import OptimizerParts
from keras_dist_torch.pieces import PartPlaces
from keras_dist_torch.pieces import Pieces
from keras_dist_torch.pieces import WorkerParts
from keras_dist_torch.pieces import all_pieces
from keras_dist_torch.pieces import is_slot
from keras_dist_torch.pieces import mark_slot
from keras_dist_torch.pieces import pieces_of
from keras_dist_torch.pieces import split
from keras_dist_torch.replicas import TorchReplicaExecutor
from keras_dist_torch.workers import TorchWorkers

# Attribute of an optimizer: its `OptimizerParts`.
_PARTS = "_keras_dist_parts"


class _Whole(threading.local):
    """Variables that are held whole while an update of this thread runs."""

    def __init__(self) -> None:
        # `None` while no update runs.
        self._held: list[Pieces] | None = None

    def hold(self, variables: Sequence[Any]) -> None:
        """Puts together the variables that are in parts, during an update."""
        if self._held is None:
            return
        for pieces in all_pieces(variables):
            if pieces.held is None:
                self._held.append(pieces)
                pieces.held = pieces.read()

    @contextlib.contextmanager
    def held(self, variables: Sequence[Any]) -> Iterator[None]:
        """Holds variables whole inside the context, those made in it too."""
        if self._held is not None:  # an outer optimizer's update is running
            self.hold(variables)
            yield
            return
        self._held = []
        try:
            self.hold(variables)
            yield
        finally:
            held, self._held = self._held, None
            with torch.no_grad():
                for pieces in held:
                    pieces.release()


_whole = _Whole()


class TorchSlotHome(ShardedHome):
    """The home of an optimizer's variable, one piece on each device."""

    def __init__(
        self, variable: keras.Variable, plan: Plan, places: PartPlaces
    ) -> None:
        super().__init__(variable)
        self._plan = plan
        self._places = places

    @property
    def _pieces(self) -> Pieces:
        return cast(Pieces, pieces_of(self.variable))

    @property
    def is_split(self) -> bool:
        return pieces_of(self.variable) is not None

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._plan.devices

    def bytes_kept(self) -> dict[Device, int]:
        pieces = pieces_of(self.variable)
        if pieces is None:
            return super().bytes_kept()
        return {
            device: tensor.nbytes
            for device, tensor in zip(
                self._plan.devices, pieces.tensors, strict=True
            )
        }

    def settle(self) -> None:
        was_split = self.is_split
        split(self.variable, self._places)
        if not was_split:
            # The update that builds its optimizer writes to slots next.
            _whole.hold([self.variable])

    def read(self, index: int) -> torch.Tensor:
        return tensor_of(self.variable).to(self._places.devices[index])

    def whole(self) -> torch.Tensor:
        return self._pieces.read()

    def set_whole(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._pieces.write(value)


@as_hook
def _hook_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    if current_replica() is not None:
        original(self, grads, trainable_variables)
        return
    with _whole.held(self.variables):
        original(self, grads, trainable_variables)


def _table() -> Iterator[Hook]:
    yield from HOOKS.rows()
    why = "an optimizer holds variables whole when called outside replicas"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", _hook_apply, why)


class TorchShardedExecutor(TorchReplicaExecutor, UpdatesParts, KeepsParts):
    """Replicas that each sum and update a part of each variable."""

    hooks = Hooks(_table)

    def __init__(self, plan: Plan, workers: TorchWorkers | None = None) -> None:
        super().__init__(plan, workers)
        self._places = PartPlaces(
            num_parts=plan.num_replicas,
            first=plan.first_replica,
            devices=self._devices,
            home=self._home,
            workers=workers,
        )

    def home(self, variable: keras.Variable) -> Home:
        if is_slot(variable):
            return TorchSlotHome(variable, self.plan, self._places)
        return super().home(variable)

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        mark_slot(variable)

    def carries(self, variables: Sequence[keras.Variable]) -> bool:
        return False  # gradients are scattered

    def update_parts(
        self,
        optimizer: Any,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        parts = self._parts_of(optimizer)
        sharded = parts.sharded
        each = [sharded.aligned(own, variables) for own in gradients]
        sums, present = parts.sum(each, weights)
        # Warns of missing gradients as Keras does, and raises if there is none.
        asked = sharded.aligned([True] * len(gradients[0]), variables)
        indices = [index for index, is_asked in enumerate(asked) if is_asked]
        sharded.checked(
            [present[index] or None for index in indices],
            [sharded.trainable_variables[index] for index in indices],
        )
        states = parts.states()
        totals = self._totals(sharded, states, sums)
        parameters = parts.parameters()
        for index, device in enumerate(self.plan.devices):
            with keras_device(device):
                sharded.update_in_place(
                    states[index],
                    sums[index],
                    parameters[index],
                    [total.to(self._devices[index]) for total in totals],
                )
        parts.keep(states[0])
        parts.give_back(parameters)
        for index, is_present in enumerate(present):
            variable = sharded.trainable_variables[index]
            if is_present and variable.constraint is not None:
                variable.assign(sharded.constrained(variable, totals))

    def _totals(
        self,
        sharded: ShardedOptimizer[Parts],
        states: Sequence[Sequence[Any]],
        sums: Sequence[Sequence[Any]],
    ) -> list[torch.Tensor]:
        """Sums the parts' amounts over replicas, in at most one collective."""
        amounts = [
            sharded.amounts(state, own)
            for state, own in zip(states, sums, strict=True)
        ]
        if not amounts[0]:
            return []
        stacked = [torch.stack(own).to(self._home) for own in amounts]
        total = functools.reduce(torch.add, stacked)
        if self.workers is not None:
            total = self.workers.sum([total])[0]
        return list(total.unbind())

    def _parts_of(self, optimizer: Any) -> OptimizerParts:
        parts: OptimizerParts | None = vars(optimizer).get(_PARTS)
        if parts is None or not parts.is_of(optimizer, self._places):
            # Of the variables that it makes, only shapes and names are used.
            with keras.device("meta"):
                sharded = ShardedOptimizer(
                    optimizer,
                    lambda v: Parts(tuple(v.shape), self.plan.num_replicas),
                )
            kind = LocalParts if self.workers is None else WorkerParts
            parts = kind(sharded, self._places)
            vars(optimizer)[_PARTS] = parts
        return parts

    @contextlib.contextmanager
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = self._parts_elsewhere(variables)
        try:
            for pieces in chosen:
                whole = pieces.read()
                if self.plan.is_chief:
                    pieces.held = whole.cpu()
            yield
        finally:
            for pieces in chosen:
                pieces.held = None

    @contextlib.contextmanager
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = self._parts_elsewhere(variables)
        with self.readable_by_chief(variables):
            yield
            for pieces in chosen:
                pieces.take_chiefs()

    def _parts_elsewhere(
        self, variables: Sequence[keras.Variable]
    ) -> list[Pieces]:
        return [] if self.workers is None else all_pieces(variables)
