"""Optimizer variables that are kept in parts, one for each replica."""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import torch

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.plugin.home import ShardedHome
from keras_dist.sharding.sharded_optimizer import Parts
from keras_dist_torch.keras_internals import forget_parameter
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.workers import TorchWorkers

# Attribute of a variable: its `Pieces`.
_PIECES = "_keras_dist_pieces"
# Set on variables that an optimizer has for one that it updates.
_SLOT = "_keras_dist_slot"


@dataclass(frozen=True)
class PartPlaces:
    """The places of the parts of variables: one on each replica's device.

    Args:
        num_parts: Integer, number of replicas of all workers.
        first: Integer, the part of this worker's first replica.
        devices: Sequence with the `torch.device` of each local replica.
        home: `torch.device` on which whole values are put together.
        workers: `TorchWorkers`, or `None`.
    """

    num_parts: int
    first: int
    devices: Sequence[torch.device]
    home: torch.device
    workers: TorchWorkers | None


class Pieces:
    """This worker's parts of one tensor.

    Attributes:
        tensors: List with the flat part of each local replica, on its device.
        held: The whole value, while it is used in place of the parts.
    """

    def __init__(self, places: PartPlaces, value: torch.Tensor) -> None:
        self._places = places
        self._parts = Parts(tuple(value.shape), places.num_parts)
        self.held: torch.Tensor | None = None
        self.tensors = [
            torch.empty(self._parts.size, dtype=value.dtype, device=device)
            for device in places.devices
        ]
        self.write(value)

    @property
    def workers(self) -> TorchWorkers | None:
        """The workers that have the other parts, `None` if all are here."""
        return self._places.workers

    def write(self, value: torch.Tensor) -> None:
        """Splits a whole value into the parts."""
        if self.held is not None:
            self.held.copy_(value)
            return
        flat = value.detach().reshape(-1)
        for index, tensor in enumerate(self.tensors):
            own = piece(flat, self._places.first + index, self._parts.size)
            tensor[: own.numel()].copy_(own)
            tensor[own.numel() :].zero_()

    def read(self) -> torch.Tensor:
        """Puts the whole value together on the primary device.

        With several workers, all of them have to call it.
        """
        if self.held is not None:
            return self.held
        here = torch.cat([t.to(self._places.home) for t in self.tensors])
        workers = self._places.workers
        if workers is not None:
            everyone = workers.gather([here])
            here = torch.cat([each[0] for each in everyone])
        return here[: self._parts.num_elements].reshape(self._parts.shape)

    def release(self) -> None:
        """Splits the held value into the parts and holds it no longer."""
        value, self.held = self.held, None
        if value is not None:
            self.write(value)

    def take_chiefs(self) -> None:
        """Splits the value that the chief holds; all workers call it."""
        own, self.held = self.held, None
        if own is None:
            own = torch.empty(
                self._parts.shape,
                dtype=self.tensors[0].dtype,
                device=self._places.home,
            )
        assert self.workers is not None
        whole = self.workers.broadcast([own.to(self._places.home)])[0]
        with torch.no_grad():
            self.write(whole)


class PiecesHome(ShardedHome):
    """The home of an optimizer's variable, one piece on each replica's device.

    Args:
        variable: A `ShardedVariable`.
        plan: The strategy's `Plan`.
        places: The `PartPlaces` of its pieces.
    """

    def __init__(
        self, variable: keras.Variable, plan: Plan, places: PartPlaces
    ) -> None:
        super().__init__(variable)
        self._plan = plan
        self._places = places

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
        split(self.variable, self._places)

    def read(self, index: int) -> torch.Tensor:
        return tensor_of(self.variable).to(self._places.devices[index])

    def whole(self) -> torch.Tensor:
        return vars(self.variable)[_PIECES].read()

    def set_whole(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            vars(self.variable)[_PIECES].write(value)


def piece(flat: torch.Tensor, part: int, size: int) -> torch.Tensor:
    """Returns a view of one part; the last parts may be shorter or empty."""
    return flat[part * size : (part + 1) * size]


def pieces_of(variable: keras.Variable) -> Pieces | None:
    """Returns a variable's pieces, or `None` if it is whole."""
    pieces: Pieces | None = vars(variable).get(_PIECES)
    return pieces


def split(variable: keras.Variable, places: PartPlaces) -> None:
    """Leaves each replica its part of a variable; idempotent and cheap.

    A variable without a value is left alone.
    """
    value = None if pieces_of(variable) else parameter_of(variable)
    if value is None:
        return
    with torch.no_grad():
        pieces = Pieces(places, value.detach())
    forget_parameter(variable)
    vars(variable)[_PIECES] = pieces


def mark_slot(variable: keras.Variable) -> None:
    """Notes that an optimizer has the variable for one that it updates."""
    vars(variable)[_SLOT] = True


def is_slot(variable: keras.Variable) -> bool:
    """Tells whether an optimizer has the variable for one that it updates."""
    return _SLOT in vars(variable)


def all_pieces(variables: Sequence[keras.Variable]) -> list[Pieces]:
    """Returns the pieces of those variables that are in pieces."""
    found = map(pieces_of, variables)
    return [pieces for pieces in found if pieces is not None]
