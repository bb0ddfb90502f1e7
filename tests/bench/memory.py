"""The memory that devices hold under each strategy, beside the plan."""

import gc
import math

import keras
import numpy as np
from rich.console import Console

import keras_dist
from bench.native import native
from keras_dist.bench import measure
from keras_dist.bench import report
from keras_dist.planning import tables
from keras_dist.planning.estimates import Placement
from keras_dist.planning.estimates import bytes_sent
from keras_dist.planning.estimates import memory
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import shards_on_devices
from keras_dist.tools import counting

# Layers of the model, all square.
NUM_LAYERS = 4


def arms(num_devices):
    """Returns functions that make the strategy of each arm, by name."""
    computing = [f"cpu:{index}" for index in range(num_devices)]

    def mirrored(**state):
        return lambda: keras_dist.MirroredStrategy(computing, **state)

    known = {
        "plain Keras": lambda: None,
        "mirrored": mirrored(),
        "central": lambda: keras_dist.CentralStorageStrategy(
            computing, f"cpu:{num_devices}"
        ),
    }
    if shards_on_devices(get_backend()):
        known["optimizer sharded"] = mirrored(optimizer_state="sharded")
        known["variables sharded"] = mirrored(variables="sharded")
    return known


def run(options):
    found = {}
    for arm in arms(options.devices):
        with measure.progress(arm, None):
            # In a process of its own.
            (found[arm],) = keras_dist.launch(
                measured,
                (arm, options.devices, options.params),
                workers=1,
                devices=options.devices + 1,
            )
    counted = native().LIVE_BYTES_TEXT
    head = report.header("bench memory")
    console = Console(highlight=False)
    console.print(_table(found))
    for text in (
        f"\n{report.machine_text(head)}",
        f"A model of {found['mirrored']['parameters']:,} parameters, float32, "
        "with Adam, after a step of `fit`; each arm in a process of its own. "
        "Planned: what `keras-dist plan` computes, without metrics and what "
        f"the framework keeps for itself. {counted}",
    ):
        console.print(text, markup=False)
    return head | {"counted": counted, "arms": found}


def measured(arm, num_devices, num_parameters):
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
    live = {str(name): n for name, n in native().live_bytes(model).items()}
    devices = dict.fromkeys((*placement.all_devices, *live))
    load = counting.load_of(model)
    return {
        "parameters": model.count_params(),
        "measured": {name: live.get(name, 0) for name in devices},
        "planned": {n: m.kept for n, m in memory(load, placement).items()},
        "bytes_sent": bytes_sent(load, placement, counting.kept_of(model)),
    }


def build_model(num_parameters):
    """Returns a model of square layers, compiled with Adam."""
    # A layer has width ** 2 + width parameters.
    each = num_parameters / NUM_LAYERS
    width = max(1, round(math.sqrt(each + 0.25) - 0.5))
    layers = [keras.layers.Dense(width, "relu") for _ in range(NUM_LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile("adam", "mse")
    return model


def _table(found):
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
    plain = max(found["plain Keras"]["measured"].values())
    for arm, numbers in found.items():
        sent = tables.bytes_text(numbers["bytes_sent"])
        pairs = (
            (name, (live, numbers["planned"].get(name, 0)))
            for name, live in numbers["measured"].items()
        )
        for names, (live, planned) in tables.alike(pairs):
            texts = tables.bytes_text(live), tables.bytes_text(planned)
            made.add_row(arm, names, *texts, f"{live / plain:.2f}", sent)
            arm = sent = ""
    return made
