"""The output of `keras-dist plan`."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_dist.planning.choice import Choice
from keras_dist.planning.load import Load
from keras_dist.planning.placement import Placement
from keras_dist.planning.placement import memory
from keras_dist.planning.tables import NUMBER
from keras_dist.planning.tables import WORD
from keras_dist.planning.tables import memory_table
from keras_dist.planning.tables import table
from keras_dist.planning.tables import transfer_sheet
from keras_dist.planning.text import bytes_text
from keras_dist.planning.traffic import Transfer
from keras_dist.planning.traffic import transfers


def show(
    console: Console,
    what: str,
    load: Load,
    choice: Choice,
    activations: int = 0,
) -> None:
    """Prints memory and traffic, and a comparison with other strategies.

    `what` describes the model; `activations` are bytes for each replica.
    """
    placement = choice.placement
    of_devices = memory(load, placement, activations)
    sent = transfers(load, placement)
    console.print(Text(f"{what}, {_where(choice.title, placement)}"))
    console.print()
    title = "Memory of each device"
    if placement.num_workers > 1:
        title += " of each worker"
    console.print(memory_table(title, of_devices))
    console.print()
    if sent:
        console.print(transfer_sheet(sent).rich())
    else:
        console.print("A step sends nothing to other devices.")
    console.print()
    console.print(_beside(load, choice, activations))
    console.print()
    console.print(
        "Gradients and slots have the type of the "
        "variables. Not counted: "
        + ("" if activations else "activations, ")
        + "metrics, buffers of the framework, copies that mixed precision "
        "casts. What is sent is the least that it can be."
    )


def _where(title: str, placement: Placement) -> str:
    devices = f"{len(placement.devices)} device"
    devices += "s" if len(placement.devices) > 1 else ""
    if placement.num_workers > 1:
        devices += f" on each of {placement.num_workers} workers"
    return f"{title}: {devices}"


def _beside(load: Load, choice: Choice, activations: int) -> Table:
    made = table(
        "Side by side: what a device that computes has",
        ("", WORD),
        ("Kept", NUMBER),
        ("In a step", NUMBER),
        ("Parameter device", NUMBER),
        ("Sent, in total", NUMBER),
    )
    for name, placement in choice.placements.items():
        of_devices = memory(load, placement, activations)
        computing = of_devices[placement.devices[0]]
        keeping = ""
        if placement.keepers:
            keeping = bytes_text(of_devices[placement.keepers[0]].most)
        made.add_row(
            Text(name, style="bold" if name == choice.title else ""),
            bytes_text(computing.kept),
            bytes_text(computing.most),
            keeping,
            bytes_text(total_of(transfers(load, placement))),
        )
    return made


def total_of(sent: tuple[Transfer, ...]) -> int:
    """Returns the bytes of all transfers."""
    return sum(transfer.total for transfer in sent)


def as_json(load: Load, choice: Choice, activations: int = 0) -> dict[str, Any]:
    """Returns the plan and those of other strategies, in types that JSON has.

    `"plans"` has each one by its name, and `"plan"` the name of the chosen one.
    Numbers are bytes.
    """
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
    sent = transfers(load, placement)
    return {
        "devices": len(placement.devices),
        "workers": placement.num_workers,
        "memory": {
            name: {
                **dataclasses.asdict(each),
                "kept": each.kept,
                "in_a_step": each.most,
            }
            for name, each in memory(load, placement, activations).items()
        },
        "transfers": [transfer.as_json() for transfer in sent],
        "bytes_sent": total_of(sent),
    }
