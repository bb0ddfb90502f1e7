"""Transfers of variables and gradients between devices, in large pieces.

Variables that were read in one round are packed into one buffer, which from
then on is sent whole to a replica on another device at its first read.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_dist.plugins import Device
from keras_dist.plugins import in_packs
from keras_dist.plugins import packs
from keras_dist_torch.flat import Arrangement
from keras_dist_torch.flat import sent_together
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.one_device import torch_device
from keras_dist_torch.record import TorchRecord

# Bytes; gradients are sent in pieces of at most this size, or of one larger
# gradient. A piece is a copy beside the gradients, on the replica's device,
# whose memory is the scarce one.
PIECE = 1 << 26


def are_apart(here: Device, there: Device) -> bool:
    """Returns whether two devices have separate memories."""
    return bool(torch_device(here) != torch_device(there))


class Pack:
    """Variables whose values lie in one buffer and are sent together."""

    def __init__(
        self, variables: Sequence[keras.Variable], device: torch.device
    ) -> None:
        parameters = [tensor_of(variable) for variable in variables]
        self._arrangement = Arrangement(parameters)
        self._flat = self._arrangement.allocate(device)
        self._variables = [weakref.ref(variable) for variable in variables]
        # Those of a kind are read and updated together.
        self.kinds = [(v.trainable, v.synchronization) for v in variables]
        self._addresses = []
        views = self._arrangement.views(self._flat)
        triples = zip(variables, parameters, views, strict=True)
        for index, (variable, parameter, view) in enumerate(triples):
            # The Parameter stays the same object: torch modules know it.
            parameter.data = view.copy_(parameter.data)
            TorchRecord.of(variable).pack = self, index
            self._addresses.append(parameter.data_ptr())

    def holds(self, index: int, parameter: torch.Tensor) -> bool:
        return bool(parameter.data_ptr() == self._addresses[index])

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that are alive and still in the buffer."""
        return [
            variable
            for variable in (reference() for reference in self._variables)
            if variable is not None and _pack_of(variable)[0] is self
        ]

    def versions(self) -> list[int | None]:
        """Returns the variables' version counters, `None` for deleted ones."""
        variables = [reference() for reference in self._variables]
        return [None if v is None else tensor_of(v)._version for v in variables]

    def send(self, device: torch.device) -> list[torch.Tensor]:
        arrived = self._arrangement.send(self._flat, device)
        return self._arrangement.views(arrived)

    def send_some(
        self, indices: Sequence[int], device: torch.device
    ) -> list[torch.Tensor]:
        views = self._arrangement.views(self._flat)
        return sent_together([views[index] for index in indices], device)


class Transfers:
    """Copies of one round between `primary` and devices in `away`, if any."""

    def __init__(
        self, primary: torch.device, away: Sequence[torch.device | None]
    ) -> None:
        self._primary = primary
        self._away = away
        # Events of unfinished copies.
        self._pending: list[Any] = []
        # Variables that were read and are in no pack, by id.
        self._loose: dict[int, keras.Variable] = {}
        # For each replica: its copies of packs, and the versions they have.
        self._sent: list[dict[Pack, tuple[list[Any], list[int | None]]]] = [
            {} for _ in away
        ]

    def read(
        self, position: int, variable: keras.Variable
    ) -> torch.Tensor | None:
        """Returns a replica's copy of a variable, `None` if it needs none."""
        device = self._away[position]
        if device is None:
            return None
        parameter = tensor_of(variable)
        pack, index = _pack_of(variable)
        if pack is None:
            self._loose[id(variable)] = variable
            return torch.empty_like(parameter, device=device).copy_(parameter)
        sent = self._sent[position]
        if pack not in sent:
            sent[pack] = pack.send(device), pack.versions()
            _note(device, self._pending)
        views, before = sent[pack]
        if before[index] != parameter._version:
            # A rendezvous has changed metric states, or updated variables. The
            # replica may be reading the other copies: they are not replaced.
            # With metrics, which are read last, nothing else is sent.
            now, kinds = pack.versions(), pack.kinds
            changed = [
                i
                for i, version in enumerate(now)
                if version != before[i] and kinds[i] == kinds[index]
            ]
            copies = pack.send_some(changed, device)
            for i, copy in zip(changed, copies, strict=True):
                views[i], before[i] = copy, now[i]
            _note(device, self._pending)
        return views[index]

    def wait(self) -> None:
        """Waits for all copies, after which their sources may be changed."""
        for event in self._pending:
            event.synchronize()
        self._pending.clear()

    def bring_back(
        self, gradients: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[list[torch.Tensor | None]]:
        """Copies each replica's gradients to the variables' device."""
        arrived = [
            list(replica_gradients)
            if device is None
            else self._brought(replica_gradients, device)
            for replica_gradients, device in zip(
                gradients, self._away, strict=True
            )
        ]
        self.wait()
        return arrived

    def _brought(
        self, gradients: Sequence[torch.Tensor | None], device: torch.device
    ) -> list[torch.Tensor | None]:
        present = [gradient for gradient in gradients if gradient is not None]
        sizes = [gradient.nbytes for gradient in present]
        views = in_packs(
            lambda piece: sent_together(piece, self._primary),
            packs([device] * len(present), sizes, PIECE),
            present,
        )
        _note(device, self._pending)
        arrived = iter(views)
        return [None if g is None else next(arrived) for g in gradients]

    def close(self, may_pack: bool) -> None:
        """Ends the round, and with `may_pack` packs variables read together."""
        self.wait()
        packs = dict.fromkeys(itertools.chain(*self._sent))
        loose = list(self._loose.values())
        self._away = [None] * len(self._away)
        self._sent.clear()
        self._loose.clear()
        if may_pack and (loose or len(packs) > 1):
            packed = [v for pack in packs for v in pack.variables]
            everything = {id(v): v for v in [*packed, *loose]}
            Pack(list(everything.values()), self._primary)


def _pack_of(variable: keras.Variable) -> tuple[Pack | None, int]:
    """Returns the pack of a variable and its position, `None` without one."""
    pack, index = TorchRecord.of(variable).pack
    if pack is None or not pack.holds(index, tensor_of(variable)):
        return None, 0
    return pack, index


def _note(device: torch.device, pending: list[Any]) -> None:
    """Adds an event that follows all work queued on a GPU so far."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        pending.append(event)
