"""Optimizer variables that are kept in parts, one for each replica."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from keras_dist.replica.variables import MirroredVariable
from keras_dist.sharding.parts import Parts
from keras_dist_torch.keras_internals import forget_parameter
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.workers import TorchWorkers


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


class ShardedVariable(MirroredVariable):
    """A variable of an optimizer, of which each replica has a part.

    It is read, saved and loaded as any other: the whole value is put together
    when it is read, and split when it is assigned. With several workers, all
    of them have to read it together.
    """

    _pieces: Pieces

    @property
    def _value(self) -> torch.Tensor:
        return self._pieces.read()

    @_value.setter
    def _value(self, value: torch.Tensor) -> None:
        self._direct_assign(value)

    def _direct_assign(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._pieces.write(value)

    def write_plainly(self, value: Any) -> Any:
        # Returns the given value, because reading takes all workers.
        return keras.Variable.assign(self, value)

    def __repr__(self) -> str:
        if self._pieces.workers is None:
            return str(super().__repr__())
        return (
            f"<Variable path={self.path}, shape={self.shape}, "
            f"dtype={self.dtype}, in parts>"
        )


def piece(flat: torch.Tensor, part: int, size: int) -> torch.Tensor:
    """Returns a view of one part; the last parts may be shorter or empty."""
    return flat[part * size : (part + 1) * size]


def shard(variable: Any, places: PartPlaces) -> None:
    """Turns a `MirroredVariable` into a `ShardedVariable`, in place.

    Nothing is done without a value.
    """
    value = parameter_of(variable)
    if value is None or isinstance(variable, ShardedVariable):
        return
    with torch.no_grad():
        pieces = Pieces(places, value.detach())
    forget_parameter(variable)
    vars(variable)["_pieces"] = pieces
    variable.__class__ = ShardedVariable


def in_parts(variables: Sequence[Any]) -> list[ShardedVariable]:
    """Returns those of the variables that are kept in parts."""
    return [v for v in variables if isinstance(v, ShardedVariable)]
