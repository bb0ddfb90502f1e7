"""Transfers: what a step moves between devices, in one piece each way.

Where replicas compute on devices without the variables, each of them is sent
all that it reads at once, when it first reads something, and its gradients
come back at once, or in a few large pieces. For that, variables that are read
together lie side by side; the `Parameter` of each is a view. Where devices
share memory, as virtual ones do, nothing moves.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_dist.core.device import Device
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.one_device import torch_device

# Of a variable: the pack that it is in, and where.
_PLACE = "_keras_dist_pack"
# Bytes; what kernels like addresses to be multiples of.
_ALIGNMENT = 64
# Bytes; gradients go back in pieces of about this size at most. Each is put
# together beside the gradients, on the device that needs its memory most.
PIECE = 1 << 26


def are_apart(here: Device, there: Device) -> bool:
    """Whether two devices have memories of their own."""
    return bool(torch_device(here) != torch_device(there))


class Arrangement:
    """Where tensors lie in one piece of memory.

    Args:
        tensors: Sequence of tensors, of any shapes and dtypes.

    Attributes:
        num_bytes: Integer, the size of the piece.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self.num_bytes = 0
        for tensor in tensors:
            start = self.num_bytes
            stop = start + tensor.numel() * tensor.element_size()
            self._places.append((start, stop, tensor.dtype, tensor.shape))
            self.num_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT

    def allocate(self, device: torch.device) -> torch.Tensor:
        """The piece of memory; on the host, one that devices copy fast."""
        is_pinned = device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(
            self.num_bytes,
            dtype=torch.uint8,
            device=device,
            pin_memory=is_pinned,
        )

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in it."""
        # `data`, because views of one tensor count in-place changes together:
        # autograd would blame the others.
        return [
            flat[start:stop].view(dtype).view(shape).data
            for start, stop, dtype, shape in self._places
        ]

    def send(self, flat: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of it on a device, under way."""
        return self.allocate(device).copy_(flat, non_blocking=True)


class Pack:
    """Variables side by side, sent together.

    Args:
        variables: Sequence of the variables; they move here.
        device: Where they are.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], device: torch.device
    ) -> None:
        parameters = [_parameter(variable) for variable in variables]
        self._arrangement = Arrangement(parameters)
        self._flat = self._arrangement.allocate(device)
        self._variables = [weakref.ref(variable) for variable in variables]
        self._addresses = []
        views = self._arrangement.views(self._flat)
        for index, (variable, parameter, view) in enumerate(
            zip(variables, parameters, views, strict=True)
        ):
            # The Parameter stays the same object: torch modules know it.
            parameter.data = view.copy_(parameter.data)
            vars(variable)[_PLACE] = (self, index)
            self._addresses.append(parameter.data_ptr())

    def holds(self, index: int, parameter: torch.Tensor) -> bool:
        """Whether a variable has not got memory of its own since."""
        return bool(parameter.data_ptr() == self._addresses[index])

    @property
    def variables(self) -> list[keras.Variable]:
        """Those of its variables that are alive and still in it."""
        return [
            variable
            for variable in (reference() for reference in self._variables)
            if variable is not None and _pack_of(variable)[0] is self
        ]

    def versions(self) -> list[int | None]:
        """How often each has been written; `None` if it is no more."""
        variables = [reference() for reference in self._variables]
        return [
            None if variable is None else _parameter(variable)._version
            for variable in variables
        ]

    def send(self, device: torch.device) -> list[torch.Tensor]:
        """A copy of each variable on a device, under way."""
        arrived = self._arrangement.send(self._flat, device)
        return self._arrangement.views(arrived)

    def send_some(
        self, indices: Sequence[int], device: torch.device
    ) -> list[torch.Tensor]:
        """A copy of some of them on a device, under way."""
        views = self._arrangement.views(self._flat)
        return sent_together([views[index] for index in indices], device)


def sent_together(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Copies of tensors on another device, under way in one piece.

    Args:
        tensors: Sequence of tensors, all on one device.
        device: Where the copies go.
    """
    if not tensors:
        return []
    arrangement = Arrangement(tensors)
    flat = arrangement.allocate(tensors[0].device)
    torch._foreach_copy_(arrangement.views(flat), list(tensors))
    return arrangement.views(arrangement.send(flat, device))


def _pieces(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in groups of `PIECE` bytes, or of a larger one alone."""
    pieces: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if tensor.nbytes > room:
            pieces.append([])
            room = PIECE
        pieces[-1].append(tensor)
        room -= tensor.nbytes
    return pieces


class Delivery:
    """What one replica has been sent in a step.

    Args:
        device: Where the replica computes.
        pending: List to which copies under way are added.
        loose: Dict of variables that were sent on their own, by id.
    """

    def __init__(
        self,
        device: torch.device,
        pending: list[Any],
        loose: dict[int, keras.Variable],
    ) -> None:
        self._device = device
        self._pending = pending
        self._loose = loose
        self.packs: dict[Pack, tuple[list[torch.Tensor], list[int | None]]] = {}

    def read(self, variable: keras.Variable) -> torch.Tensor:
        """A variable's value as it is now, on the replica's device."""
        parameter = _parameter(variable)
        pack, index = _pack_of(variable)
        if pack is None:
            self._loose[id(variable)] = variable
            return self._alone(parameter)
        if pack not in self.packs:
            self._send(pack)
        views, versions = self.packs[pack]
        if versions[index] != parameter._version:
            self._send_again(pack)
            views, _ = self.packs[pack]
        return views[index]

    def _send(self, pack: Pack) -> None:
        self.packs[pack] = pack.send(self._device), pack.versions()
        _note(self._device, self._pending)

    def _send_again(self, pack: Pack) -> None:
        """Sends what a meeting has changed, as a metric's state or by updates.

        Other tensors stay as they are: the replica may read them already.
        """
        views, before = self.packs[pack]
        now = pack.versions()
        changed = [i for i, version in enumerate(now) if version != before[i]]
        for index, view in zip(
            changed, pack.send_some(changed, self._device), strict=True
        ):
            views[index] = view
        self.packs[pack] = views, now
        _note(self._device, self._pending)

    def _alone(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(parameter, device=self._device).copy_(parameter)


class Transfers:
    """What moves in one round of replicas.

    Args:
        home: Where variables are.
        away: For each replica that takes part, its device, or `None` where it
            shares memory with the variables.
    """

    def __init__(
        self, home: torch.device, away: Sequence[torch.device | None]
    ) -> None:
        self._home = home
        self._away = away
        self._pending: list[Any] = []
        self._loose: dict[int, keras.Variable] = {}
        self._deliveries = [
            device and Delivery(device, self._pending, self._loose)
            for device in away
        ]

    def read(
        self, position: int, variable: keras.Variable
    ) -> torch.Tensor | None:
        """What a replica reads that is away; `None` for one that is not."""
        delivery = self._deliveries[position]
        return None if delivery is None else delivery.read(variable)

    def wait(self) -> None:
        """Waits until what was sent may be changed where it was."""
        for event in self._pending:
            event.synchronize()
        self._pending.clear()

    def bring_back(
        self, gradients: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[list[torch.Tensor | None]]:
        """Gradients of each replica that takes part, where variables are.

        Args:
            gradients: For each, its gradients, `None` where it has none.
        """
        arrived = [
            list(own) if device is None else self._brought(own, device)
            for own, device in zip(gradients, self._away, strict=True)
        ]
        self.wait()
        return arrived

    def _brought(
        self, own: Sequence[torch.Tensor | None], device: torch.device
    ) -> list[torch.Tensor | None]:
        present = [gradient for gradient in own if gradient is not None]
        views = iter(
            [
                view
                for piece in _pieces(present)
                for view in sent_together(piece, self._home)
            ]
        )
        _note(device, self._pending)
        return [None if gradient is None else next(views) for gradient in own]

    def close(self, may_pack: bool) -> None:
        """Ends it: nothing that was sent stays.

        Args:
            may_pack: Boolean, whether what was read together may now be put
                side by side.
        """
        self.wait()
        packs = {
            pack: None
            for delivery in self._deliveries
            if delivery is not None
            for pack in delivery.packs
        }
        loose = list(self._loose.values())
        self._deliveries = [None] * len(self._deliveries)
        self._loose.clear()
        if may_pack and (loose or len(packs) > 1):
            packed = [v for pack in packs for v in pack.variables]
            everything = {id(v): v for v in [*packed, *loose]}
            Pack(list(everything.values()), self._home)


def _parameter(variable: keras.Variable) -> torch.Tensor:
    parameter = parameter_of(variable)
    assert parameter is not None
    return parameter


def _pack_of(variable: keras.Variable) -> tuple[Pack | None, int]:
    """The pack that a variable is in, and where."""
    pack, index = vars(variable).get(_PLACE, (None, 0))
    if pack is None or not pack.holds(index, _parameter(variable)):
        return None, 0
    return pack, index


def _note(device: torch.device, pending: list[Any]) -> None:
    """Adds a mark that comes after all that a device was given to do."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        pending.append(event)
