"""Optimizer variables in parts, one for each replica, and their exchange.

Gradients go to the replicas of their parts, updated variables back. Workers
send matrices whose row `p` has part `p` of every variable.
"""

from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import cast

import keras
import torch

from keras_dist.core.packing import packs
from keras_dist.replica.adoption import adopt_slot
from keras_dist.sharding.sharded_optimizer import Parts
from keras_dist.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.keras_internals import forget_parameter
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.transfers import numbers_on
from keras_dist_torch.workers import TorchWorkers

# Attribute of a variable: its `Pieces`.
_PIECES = "_keras_dist_pieces"
# Set on variables that an optimizer has for one that it updates.
_SLOT = "_keras_dist_slot"


@dataclass(frozen=True)
class PartPlaces:
    """The places of the parts of variables: one on each replica's device."""

    num_parts: int  # of all workers
    first: int  # the part of this worker's first replica
    devices: Sequence[torch.device]
    home: torch.device  # where whole values are put together
    workers: TorchWorkers | None


class Pieces:
    """This worker's parts of one tensor; `held` is a whole in their place."""

    def __init__(self, places: PartPlaces, value: torch.Tensor) -> None:
        self._places = places
        self._parts = Parts(tuple(value.shape), places.num_parts)
        self.held: torch.Tensor | None = None
        self.tensors = [
            torch.empty(self._parts.size, dtype=value.dtype, device=device)
            for device in places.devices
        ]
        self.write(value)

    def write(self, value: torch.Tensor) -> None:
        if self.held is not None:
            self.held.copy_(value)
            return
        flat = value.detach().reshape(-1)
        for index, tensor in enumerate(self.tensors):
            own = piece(flat, self._places.first + index, self._parts.size)
            tensor[: own.numel()].copy_(own)
            tensor[own.numel() :].zero_()

    def read(self) -> torch.Tensor:
        """Puts the whole value together on the primary; all workers call it."""
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
        workers = self._places.workers
        assert workers is not None
        whole = workers.broadcast([own.to(self._places.home)])[0]
        with torch.no_grad():
            self.write(whole)


def piece(flat: torch.Tensor, part: int, size: int) -> torch.Tensor:
    """Returns a view of one part; the last parts may be shorter or empty."""
    return flat[part * size : (part + 1) * size]


def pieces_of(variable: keras.Variable) -> Pieces | None:
    """Returns a variable's pieces, or `None` if it is whole."""
    return cast("Pieces | None", vars(variable).get(_PIECES))


def split(variable: keras.Variable, places: PartPlaces) -> None:
    """Leaves each replica its part of a variable with a value; idempotent."""
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
    return _SLOT in vars(variable)


def all_pieces(variables: Sequence[keras.Variable]) -> list[Pieces]:
    """Returns the pieces of those variables that are in pieces."""
    found = map(pieces_of, variables)
    return [pieces for pieces in found if pieces is not None]


# For each local replica, its part of each variable, or `None`.
PartsOfAll = list[list[Any]]


class OptimizerParts(ABC):
    """This worker's parts of one optimizer's variables, which it makes."""

    def __init__(
        self, sharded: ShardedOptimizer[Parts], places: PartPlaces
    ) -> None:
        self.sharded = sharded
        self.places = places
        self.sizes = [parts.size for parts in sharded.parts]
        for position, variable in enumerate(sharded.variables):
            if sharded.is_sharded(position):
                mark_slot(variable)
                adopt_slot(variable, sharded.trainable_variables[0])
                split(variable, places)

    def is_of(self, optimizer: Any, places: PartPlaces) -> bool:
        return self.places is places and self.sharded.is_of(optimizer)

    def states(self) -> PartsOfAll:
        """Returns the tensors that each local replica's update works on."""
        return [
            [self._state(v, index, device) for v in self.sharded.variables]
            for index, device in enumerate(self.places.devices)
        ]

    def _state(
        self, variable: Any, index: int, device: torch.device
    ) -> torch.Tensor:
        pieces = pieces_of(variable)
        if pieces is not None:
            return pieces.tensors[index]
        # A copy, because every part's update increments the count of steps.
        return tensor_of(variable).detach().to(device, copy=True)

    def keep(self, state: Sequence[torch.Tensor]) -> None:
        """Sets the variables without parts to one part's updated state."""
        for variable, value in zip(self.sharded.variables, state, strict=True):
            if pieces_of(variable) is None:
                tensor_of(variable).copy_(value)

    @abstractmethod
    def sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> tuple[PartsOfAll, list[bool]]:
        """Sums gradients; returns replicas' parts, and which exist."""

    def parameters(self) -> PartsOfAll:
        """Returns each local replica's parts of the variables, to write to."""
        is_copied = self.places.workers is not None
        return [
            [
                _filled(
                    piece(self.flat(i), number, size).to(
                        device, copy=is_copied
                    ),
                    size,
                )
                for i, size in enumerate(self.sizes)
            ]
            for number, device in enumerate(
                self.places.devices, start=self.places.first
            )
        ]

    @abstractmethod
    def give_back(self, parameters: PartsOfAll) -> None:
        """Assigns the parts that all replicas have written to the variables."""

    def flat(self, index: int) -> torch.Tensor:
        """Returns a variable's tensor, flat, and as a view if it can be one."""
        variable = self.sharded.trainable_variables[index]
        return tensor_of(variable).detach().reshape(-1)

    def write(self, index: int, flat: torch.Tensor) -> None:
        """Copies elements to a variable, unless they are a view of it."""
        own = tensor_of(self.sharded.trainable_variables[index])
        if flat.data_ptr() != own.data_ptr():
            own.copy_(flat[: own.numel()].view(own.shape))


class LocalParts(OptimizerParts):
    """Exchange between the replicas of one process, by plain copies."""

    def sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> tuple[PartsOfAll, list[bool]]:
        present = [
            any(own[index] is not None for own in gradients)
            for index in range(len(self.sizes))
        ]
        devices = self.places.devices
        if len(set(devices)) == 1:
            # Sums whole gradients at once, of which the parts are views.
            whole = weighted_sum(gradients, weights, devices[0])
            sums = [self._part(whole, part) for part in range(len(devices))]
        else:
            sums = [
                weighted_sum(
                    [self._part(own, part) for own in gradients],
                    weights,
                    device,
                )
                for part, device in enumerate(devices)
            ]
        return [
            [
                None if g is None else _filled(g, size)
                for g, size in zip(own, self.sizes, strict=True)
            ]
            for own in sums
        ], present

    def _part(self, gradients: Sequence[Any], part: int) -> list[Any]:
        return [
            None if g is None else piece(g.detach().reshape(-1), part, size)
            for g, size in zip(gradients, self.sizes, strict=True)
        ]

    def give_back(self, parameters: PartsOfAll) -> None:
        for index, size in enumerate(self.sizes):
            flat = self.flat(index)
            for part, own in enumerate(parameters):
                target, value = piece(flat, part, size), own[index]
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value[: target.numel()])
            self.write(index, flat)


class WorkerParts(OptimizerParts):
    """Exchange between workers: a reduce-scatter and an all-gather by dtype."""

    def __init__(
        self, sharded: ShardedOptimizer[Parts], places: PartPlaces
    ) -> None:
        super().__init__(sharded, places)
        count = len(self.sizes)
        self._dtypes = [self.flat(i).dtype for i in range(count)]
        self._packs = packs(self._dtypes)

    def sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> tuple[PartsOfAll, list[bool]]:
        here = weighted_sum(gradients, weights, self.places.home)
        count = len(self.sizes)
        sums: PartsOfAll = [[None] * count for _ in self.places.devices]
        present = [False] * count
        for indices in self._packs:
            rows = self._rows([here[i] for i in indices], indices)
            has = [float(here[i] is not None) for i in indices]
            total, counts = self._scatter(rows, has)
            for i, counted in zip(indices, counts, strict=True):
                present[i] = bool(counted)
            sizes = [self.sizes[i] for i in indices]
            for part, row in enumerate(total):
                device = self.places.devices[part]
                for i, own in zip(indices, row.split(sizes), strict=True):
                    if present[i]:
                        sums[part][i] = own.to(device)
        return sums, present

    def _scatter(
        self, rows: torch.Tensor, has: list[float]
    ) -> tuple[torch.Tensor, list[float]]:
        """Sums rows and flags over workers; returns this worker's of both."""
        workers, local = self.places.workers, len(self.places.devices)
        assert workers is not None
        count = workers.cluster.num_workers
        flags = numbers_on(rows.device, has).to(rows.dtype)
        flags = flags.expand(count, len(has))
        sent = torch.cat([rows.reshape(count, -1), flags], dim=1)
        own = workers.scatter_sum(sent)
        numbers = own[own.numel() - len(has) :]
        total = own[: own.numel() - len(has)].reshape(local, -1)
        return total, numbers.tolist()

    def _rows(
        self, values: Sequence[torch.Tensor | None], indices: Sequence[int]
    ) -> torch.Tensor:
        """Splits whole tensors into a row for each part of all workers."""
        num_parts = self.places.num_parts
        columns = []
        for value, index in zip(values, indices, strict=True):
            size, dtype = self.sizes[index], self._dtypes[index]
            if value is None:
                value = torch.zeros(0, device=self.places.home)
            flat = value.detach().reshape(-1).to(dtype)
            flat = _filled(flat, num_parts * size)
            columns.append(flat.reshape(num_parts, size))
        return torch.cat(columns, dim=1)

    def give_back(self, parameters: PartsOfAll) -> None:
        workers, num_parts = self.places.workers, self.places.num_parts
        assert workers is not None
        for indices in self._packs:
            own = torch.cat(
                [
                    row[i].to(self.places.home)
                    for row in parameters
                    for i in indices
                ]
            )
            rows = workers.gather_flat(own).reshape(num_parts, -1)
            sizes = [self.sizes[i] for i in indices]
            for i, columns in zip(
                indices, rows.split(sizes, dim=1), strict=True
            ):
                self.write(i, columns.reshape(-1))


def _filled(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Pads a flat tensor with zeros to a size."""
    missing = size - flat.numel()
    if not missing:
        return flat
    return torch.nn.functional.pad(flat, (0, missing))
