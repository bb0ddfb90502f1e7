"""The options of `keras-dist plan`, checked, and its output."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from keras_dist.planning import tables
from keras_dist.planning.estimates import ALL_SPLIT
from keras_dist.planning.estimates import SLOTS_SPLIT
from keras_dist.planning.estimates import Load
from keras_dist.planning.estimates import Placement
from keras_dist.planning.estimates import bytes_sent
from keras_dist.planning.estimates import memory
from keras_dist.planning.estimates import transfers
from keras_dist.planning.targets import Target

SHARDED = "optimizer sharded"
VARIABLES_SHARDED = "variables sharded"
_TITLES = {
    None: "mirrored",
    SLOTS_SPLIT: SHARDED,
    ALL_SPLIT: VARIABLES_SHARDED,
}
_OPTIONS = {SLOTS_SPLIT: "--optimizer-state", ALL_SPLIT: "--variables"}

# Optimizers that can't update a part of a variable without the rest of it.
_NEED_WHOLE_VARIABLES = ("adafactor", "lamb", "muon")


@dataclass(frozen=True)
class Choice:
    """A strategy and its devices; numbers that are `None` have defaults."""

    strategy: str = "mirrored"
    devices: int | None = None
    workers: int | None = None
    parameter_devices: int = 1
    split: str | None = None  # as in a `Placement`

    def check(self, optimizer: str | None) -> None:
        """Refuses combinations of options that no strategy supports."""
        if self.strategy == "one-device" and (self.devices or 1) > 1:
            raise ValueError(
                f"--devices {self.devices}: one-device computes on one "
                "device. Leave --devices out, or choose another --strategy."
            )
        if self.strategy != "multi-worker" and (self.workers or 1) > 1:
            raise ValueError(
                f"--workers {self.workers}: {self.strategy} has one worker. "
                "Choose --strategy multi-worker."
            )
        if self.strategy != "central" and self.parameter_devices > 1:
            raise ValueError(
                f"--parameter-devices {self.parameter_devices}: with "
                f"{self.strategy}, each device has all variables. Choose "
                "--strategy central."
            )
        if self.split and self.strategy in ("one-device", "central"):
            raise ValueError(
                f"{_OPTIONS[self.split]} sharded: each replica of mirrored and "
                f"multi-worker keeps a part. Received: --strategy "
                f"{self.strategy}, which has one copy."
            )
        needs_whole = (optimizer or "").lower() in _NEED_WHOLE_VARIABLES
        if self.split == SLOTS_SPLIT and needs_whole:
            raise ValueError(
                f"--optimizer-state sharded: on JAX, the update of {optimizer} "
                "takes whole variables, not parts. Choose another optimizer, "
                "or --optimizer-state mirrored. For PyTorch, where workers "
                "can shard it, plan your model with --model and "
                "KERAS_BACKEND=torch."
            )

    @property
    def placement(self) -> Placement:
        return self.placements[self.title]

    @property
    def title(self) -> str:
        """The key of the chosen strategy in `placements`."""
        if self.strategy in ("one-device", "central"):
            return self.strategy.replace("-", " ")
        return _TITLES[self.split]

    @property
    def placements(self) -> dict[str, Placement]:
        """All placements on as many devices, by name."""
        workers = self.workers or (2 if self.strategy == "multi-worker" else 1)
        count = self.devices or (1 if self.strategy == "one-device" else 8)
        devices = tuple(f"device {i}" for i in range(count))
        parameter_devices: tuple[str, ...] = ("parameter device",)
        if self.parameter_devices > 1:
            parameter_devices = tuple(
                f"parameter device {i}" for i in range(self.parameter_devices)
            )
        known = {
            "one device": Placement(devices[:1]),
            **{
                title: Placement(devices, (), workers, split)
                for split, title in _TITLES.items()
            },
        }
        if workers == 1:
            known["central"] = Placement(devices, parameter_devices)
        return known


def choice_on(
    target: Target,
    workers: Sequence[int],
    strategy: str | None,
    split: str | None,
) -> Choice:
    """Returns a strategy on a target; each worker has a number of devices."""
    name = strategy or ("mirrored" if len(workers) == 1 else "multi-worker")
    if name != "multi-worker" and len(workers) > 1:
        raise ValueError(
            f"--strategy {name}: it has one worker. Received: {target}, with "
            f"{len(workers)} workers. Choose --strategy multi-worker, or a "
            "target with one worker."
        )
    count = 1 if name == "one-device" else workers[0]
    hosts = len(workers) if name == "multi-worker" else None
    choice = Choice(name, count, hosts, 1, split)
    choice.check(None)
    return choice


def report_of(
    what: str, load: Load, choice: Choice, activations: int = 0
) -> tables.TableReport:
    """Returns memory and traffic, and a comparison with other strategies."""
    placement = choice.placement
    count = len(placement.devices)
    where = f"{count} device{'s' if count > 1 else ''}"
    title = "Memory of each device"
    if placement.num_workers > 1:
        where += f" on each of {placement.num_workers} workers"
        title += " of each worker"
    sent = transfers(load, placement)
    shown = [
        tables.memory_table(title, memory(load, placement, activations)),
        *([tables.transfer_table(sent)] if sent else []),
        _beside(load, choice, activations),
    ]
    notes = [
        *([] if sent else ["A step sends nothing to other devices."]),
        "Gradients and slots have the type of the variables. Not counted: "
        + ("" if activations else "activations, ")
        + "metrics, buffers of the framework, copies that mixed precision "
        "makes, what an update computes with. The numbers for what is sent "
        "are the least possible, if gradients are summed in the type of the "
        "variables.",
    ]
    return tables.TableReport(f"{what}, {choice.title}: {where}", shown, notes)


def _beside(load: Load, choice: Choice, activations: int) -> Table:
    made = tables.table(
        "Side by side: one computing device of each strategy",
        ("", tables.WORD),
        ("Kept", tables.NUMBER),
        ("In a step", tables.NUMBER),
        ("Parameter device", tables.NUMBER),
        ("Sent, in total", tables.NUMBER),
    )
    for name, placement in choice.placements.items():
        of_devices = memory(load, placement, activations)
        computing = of_devices[placement.devices[0]]
        keeping = ""
        if placement.parameter_devices:
            keeping = tables.bytes_text(
                of_devices[placement.parameter_devices[0]].most
            )
        made.add_row(
            Text(name, style="bold" if name == choice.title else ""),
            tables.bytes_text(computing.kept),
            tables.bytes_text(computing.most),
            keeping,
            tables.bytes_text(bytes_sent(load, placement)),
        )
    return made


def as_json(load: Load, choice: Choice, activations: int = 0) -> dict[str, Any]:
    """Returns all strategies' plans, in bytes, for JSON."""
    return {
        "load": {
            "trainable": load.trainable,
            "frozen": load.frozen,
            "optimizer": load.optimizer(),
        },
        "plan": choice.title,
        "plans": {
            name: _plan_json(load, placement, activations)
            for name, placement in choice.placements.items()
        },
    }


def _plan_json(
    load: Load, placement: Placement, activations: int
) -> dict[str, Any]:
    return {
        "devices": len(placement.devices),
        "workers": placement.num_workers,
        "memory": {
            name: {
                **dataclasses.asdict(device_memory),
                "kept": device_memory.kept,
                "in_a_step": device_memory.most,
            }
            for name, device_memory in memory(
                load, placement, activations
            ).items()
        },
        "transfers": [
            dataclasses.asdict(transfer) | {"sent": dict(transfer.sent)}
            for transfer in transfers(load, placement)
        ],
        "bytes_sent": bytes_sent(load, placement),
    }
