"""The memory that devices hold under each strategy, beside the plan."""

import gc
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from rich.table import Table

from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.benchmarks import lacking
from keras_dist.bench.measure import Job
from keras_dist.bench.measure import in_turn
from keras_dist.bench.report import BenchReport
from keras_dist.bench.report import Output
from keras_dist.bench.report import draw_bytes
from keras_dist.bench.report import header
from keras_dist.launch.function import launch
from keras_dist.planning import tables
from keras_dist.planning.estimates import Placement
from keras_dist.planning.estimates import bytes_sent
from keras_dist.planning.estimates import memory
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import shards_on_devices
from keras_dist.strategies.central_storage import CentralStorageStrategy
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.strategy import Strategy
from keras_dist.tools import counting

SHARDED = "optimizer sharded"
VARIABLES_SHARDED = "variables sharded"
_LACK = "can't tell how much memory is held"
# Layers of the model, all square.
NUM_LAYERS = 4


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of one arm between steps, by device."""

    arm: str
    parameters: int
    measured: Mapping[str, int]
    planned: Mapping[str, int]
    bytes_sent: int  # in a step, as planned


def arms(num_devices: int) -> dict[str, Callable[[], Strategy | None]]:
    """Returns functions that make the strategy of each arm, by name."""
    computing = [f"cpu:{index}" for index in range(num_devices)]
    known: dict[str, Callable[[], Strategy | None]] = {
        "plain Keras": lambda: None,
        "mirrored": lambda: MirroredStrategy(computing),
        "central": lambda: CentralStorageStrategy(
            computing, f"cpu:{num_devices}"
        ),
    }
    if shards_on_devices(get_backend()):
        known[SHARDED] = lambda: MirroredStrategy(
            computing, optimizer_state="sharded"
        )
        known[VARIABLES_SHARDED] = lambda: MirroredStrategy(
            computing, variables="sharded"
        )
    return known


def run_memory(num_devices: int, num_parameters: int, output: Output) -> None:
    """Measures what devices hold after a step, and shows it beside the plan."""
    counted = get_benchmarks(_LACK).live_bytes_text
    if counted is None:
        raise lacking(_LACK)

    def job(arm: str) -> Job[list[Any]]:
        arguments = arm, num_devices, num_parameters
        return lambda _: launch(
            measure_memory, arguments, workers=1, devices=num_devices + 1
        )

    found = in_turn({arm: job(arm) for arm in arms(num_devices)})
    measured = [each for (each,) in found]
    output.publish(report_of_memory(measured, counted))


def measure_memory(
    arm: str, num_devices: int, num_parameters: int
) -> MeasuredMemory:
    """Trains for one step, and counts the bytes that are alive then."""
    strategy = arms(num_devices)[arm]()
    if strategy is None:
        model = build_model(num_parameters)
        placement = Placement(("cpu:0",))
    else:
        with strategy.scope():
            model = build_model(num_parameters)
        placement = counting.placement_of(strategy.plan)
    rows, width = 4 * num_devices, model.input_shape[-1]
    x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    model.fit(x, x, batch_size=rows, epochs=1, verbose=0)
    # Nothing stays alive but the model.
    del x
    gc.collect()
    held = get_benchmarks(_LACK).live_bytes(model)
    assert held is not None  # `run_memory` starts this where it is counted.
    live = {str(name): n for name, n in held.items()}
    devices = dict.fromkeys((*placement.all_devices, *live))
    load = counting.load_of(model)
    return MeasuredMemory(
        arm,
        sum(math.prod(each.shape) for each in model.trainable_variables),
        {name: live.get(name, 0) for name in devices},
        {name: m.kept for name, m in memory(load, placement).items()},
        bytes_sent(load, placement, counting.kept_of(model)),
    )


def build_model(num_parameters: int) -> keras.Model:
    """Returns a model of square layers, compiled with Adam."""
    # A layer has width ** 2 + width parameters.
    each = num_parameters / NUM_LAYERS
    width = max(1, round(math.sqrt(each + 0.25) - 0.5))
    model = keras.Sequential(
        [
            keras.Input((width,)),
            *(keras.layers.Dense(width, "relu") for _ in range(NUM_LAYERS)),
        ]
    )
    model.compile("adam", "mse")
    return model


def report_of_memory(
    measured: Sequence[MeasuredMemory], counted: str
) -> BenchReport:
    """Returns the report on the bytes that devices hold in each arm."""
    return BenchReport(
        tables=[memory_table(measured)],
        notes=[
            f"A model of {measured[0].parameters:,} parameters, float32, with "
            "Adam, after a step of `fit`; each arm in a process of its own. "
            "Planned: what `keras-dist plan` computes, without metrics and "
            f"what the framework keeps for itself. {counted}",
        ],
        content=header("memory")
        | {
            "counted": counted,
            "arms": {
                numbers.pop("arm"): numbers for numbers in map(asdict, measured)
            },
        },
        draw=lambda path: draw_bytes(
            path, {each.arm: each.measured for each in measured}
        ),
    )


def memory_table(measured: Sequence[MeasuredMemory]) -> Table:
    """Returns a table; in each arm, devices that hold the same share a row."""
    made = tables.table(
        "Held between steps",
        ("Arm", tables.WORD),
        ("Device", tables.WORD),
        ("Measured", tables.NUMBER),
        ("Planned", tables.NUMBER),
        ("Of plain Keras", tables.NUMBER),
        ("Sent in a step", tables.NUMBER),
    )
    plain = max(measured[0].measured.values())
    for each in measured:
        arm, sent = each.arm, tables.bytes_text(each.bytes_sent)
        pairs = (
            (name, (held, each.planned.get(name, 0)))
            for name, held in each.measured.items()
        )
        for names, (held, planned) in tables.alike(pairs):
            numbers = tables.bytes_text(held), tables.bytes_text(planned)
            made.add_row(arm, names, *numbers, f"{held / plain:.2f}", sent)
            arm = sent = ""
    return made
