"""The part of `keras-dist bench loops` that uses Keras."""

import functools
import os
from collections.abc import Sequence

from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.loops import MODELS
from keras_dist.bench.loops import ModelSize
from keras_dist.bench.loops import Setting
from keras_dist.bench.measure import measure
from keras_dist.bench.output import Output
from keras_dist.bench.output import report_of
from keras_dist.bench.portable import SCANNED_STEPS
from keras_dist.bench.progress import in_turn
from keras_dist.errors import DeviceError
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.backend import set_virtual_devices

ARMS = (
    "Ours: `strategy.run` of a `keras_dist.function`. Reduced: and the loss "
    "reduced in each step. Ragged: with a row less, in shares of two sizes. "
    f"Scan: `scan_steps` of {SCANNED_STEPS}. Keras: a Keras model in the "
    "framework's own loop."
)


def run_loops(
    replicas: Sequence[int] | None,
    models: Sequence[str],
    device_type: str,
    rounds: int,
    seconds: float,
    output: Output,
) -> None:
    """Measures the portable loop beside the framework's own, and shows ratios.

    `replicas` of `None` are all numbers that `groups_of_devices` chooses. A
    block takes about `seconds`, and each arm has `rounds` of them.

    Raises:
        ValueError: If a model is unknown, or can't be cut into equal shares.
        KerasDistError: If the devices or the native loops can't be had, or if
            the arms don't compute the same.
    """
    sizes = [size_of(name) for name in models]
    groups = groups_of_devices(replicas, device_type)
    benchmarks = get_benchmarks("has no loop to compare with")
    settings = [Setting(size, devices) for size in sizes for devices in groups]
    check_shares(settings)
    jobs = {
        setting.title: functools.partial(
            measure, benchmarks, setting, rounds, seconds
        )
        for setting in settings
    }
    measured = in_turn(jobs, rounds)
    output.publish(report_of("loops", measured, benchmarks.loop_text, [ARMS]))


def size_of(name: str) -> ModelSize:
    """Returns the model that has a name.

    Raises:
        ValueError: If there is none.
    """
    if name not in MODELS:
        raise ValueError(
            f"There is no model of that name. Received: {name!r}. Expected: "
            f"some of {', '.join(MODELS)}, separated by commas."
        )
    return MODELS[name]


def check_shares(settings: Sequence[Setting]) -> None:
    """Refuses batches that can't be split into equal shares.

    The framework's own distribution needs them.

    Raises:
        ValueError: If a batch can't be split so.
    """
    for setting in settings:
        rows = setting.size.rows
        if rows % setting.num_replicas:
            raise ValueError(
                f"The {rows} rows of '{setting.size.name}' can't be cut into "
                f"equal shares. Received: N = {setting.num_replicas}. "
                f"Expected: a number that divides {rows}, such as 2 or 4."
            )


def groups_of_devices(
    replicas: Sequence[int] | None, device_type: str
) -> list[tuple[str, ...]]:
    """Returns the devices of each number of replicas; CPUs are virtual devices.

    `replicas` of `None` are 1, 2, 4 and so on up to all devices (for CPUs,
    cores).

    Raises:
        DeviceError: If there are fewer.
        VirtualDevicesError: If CPUs can't be split any more.
    """
    on_cpu = device_type == "cpu"
    if replicas is None:
        count = os.cpu_count() if on_cpu else len(list_devices(device_type))
        most = max(1, count or 1)
        replicas = sorted({2**i for i in range(most.bit_length())} | {most})
    if on_cpu:
        set_virtual_devices(max(replicas))
    present = list_devices(device_type)
    if len(present) < max(replicas):
        raise DeviceError(
            "There are fewer devices than replicas. Received: "
            f"{max(replicas)} replicas on '{device_type}'. Expected: at most "
            f"{len(present)}, or --device cpu, which makes virtual devices."
        )
    return [tuple(present[:n]) for n in replicas]
