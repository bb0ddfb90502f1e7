"""The bytes that each step sends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_dist.planning.load import Load
from keras_dist.planning.placement import Placement


@dataclass(frozen=True)
class Kept:
    """Bytes of the variables that a parameter device keeps.

    `weights` counts all of the model's variables there, `trainable` those that
    are trained.
    """

    weights: int
    trainable: int


@dataclass(frozen=True)
class Transfer:
    """One kind of traffic in a step.

    Args:
        what: Such as `"gradients, all-reduce"`.
        between: `"devices"` of a worker, or `"workers"`.
        sent: Pairs of a sender's name and its bytes.
        total: The bytes that all send, on all workers.
    """

    what: str
    between: str
    sent: tuple[tuple[str, int], ...]
    total: int

    def as_json(self) -> dict[str, Any]:
        """Returns the transfer in types that JSON has."""
        return {
            "what": self.what,
            "between": self.between,
            "sent": dict(self.sent),
            "total": self.total,
        }


def transfers(
    load: Load,
    placement: Placement,
    kept: Mapping[str, Kept] | None = None,
) -> tuple[Transfer, ...]:
    """Returns the traffic of a step.

    The package's docstring has the formulas. `kept` maps the name of each
    parameter device to its `Kept`; `None` assumes equal parts.
    """
    if placement.keepers:
        local = _to_and_from_keepers(load, placement, kept)
    else:
        local = _all_reduce(
            load.trainable, placement, placement.devices, "devices"
        )
    workers = tuple(f"worker {i}" for i in range(placement.num_workers))
    return (*local, *_all_reduce(load.trainable, placement, workers, "workers"))


def _all_reduce(
    num_bytes: int,
    placement: Placement,
    names: tuple[str, ...],
    between: str,
) -> tuple[Transfer, ...]:
    count = len(names)
    times = placement.num_workers if between == "devices" else 1
    if count == 1:
        return ()
    # Computed from the whole, because each part is rounded up.
    total = 2 * (count - 1) * num_bytes
    if not placement.is_sharded:
        each = math.ceil(total / count)
        sent = tuple((name, each) for name in names)
        what = "gradients, all-reduce"
        return (Transfer(what, between, sent, times * total),)
    each = math.ceil(total / 2 / count)
    sent = tuple((name, each) for name in names)
    return tuple(
        Transfer(what, between, sent, times * total // 2)
        for what in ("gradients, reduce-scatter", "parameters, all-gather")
    )


def _to_and_from_keepers(
    load: Load, placement: Placement, kept: Mapping[str, Kept] | None
) -> tuple[Transfer, ...]:
    devices, keepers = placement.devices, placement.keepers
    if kept is None:
        count = len(keepers)
        part = Kept(
            math.ceil(load.weights / count), math.ceil(load.trainable / count)
        )
        kept = dict.fromkeys(keepers, part)
    parameters = {
        name: part.weights * sum(device != name for device in devices)
        for name, part in kept.items()
    }
    gradients = {
        device: sum(
            part.trainable for name, part in kept.items() if name != device
        )
        for device in devices
    }
    return tuple(
        Transfer(
            what,
            "devices",
            tuple((name, sent) for name, sent in each.items() if sent),
            placement.num_workers * sum(each.values()),
        )
        for what, each in (
            ("parameters, to replicas", parameters),
            ("gradients, to parameters", gradients),
        )
        if any(each.values())
    )
