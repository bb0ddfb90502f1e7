"""Training over workers, beside the framework's own distribution."""

import functools
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from keras_dist.bench import loops
from keras_dist.bench import measure
from keras_dist.bench.benchmarks import NativeWorkers
from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.benchmarks import lacking
from keras_dist.bench.portable import PortableLoop
from keras_dist.bench.report import BenchReport
from keras_dist.bench.report import Output
from keras_dist.bench.report import report_of
from keras_dist.bench.tasks import FitLoop
from keras_dist.bench.tasks import task_of
from keras_dist.environment.machine import VISIBLE
from keras_dist.environment.machine import gpus
from keras_dist.errors import DeviceError
from keras_dist.launch.function import launch
from keras_dist.plugin.membership import alone_on_purpose
from keras_dist.plugin.workers import Workers
from keras_dist.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy,
)
from keras_dist.strategies.strategy import Strategy

ARMS = (
    "N: workers, all on this machine. Ours: `train_on_batch`, the "
    "step of `fit`, under `MultiWorkerMirroredStrategy`, each worker given "
    "the global batch. Run: `strategy.run` of a `keras_dist.function`, with "
    "batches that were split before. Fit: `fit` for one epoch of NumPy "
    "arrays, with what it takes to start. Keras: `train_on_batch` without a "
    "strategy, of a worker's rows: no worker waits for another. Sent: by the "
    "first worker over TCP, not counted for GPUs; least: what an all-reduce "
    "of the gradients has to send."
)
# The arm in which workers don't wait for each other.
ALONE = "Keras"
# The arm whose loss is the mean of all steps, not the last one's.
FIT = "fit"
_LACK = "has no distribution over workers to compare with"


def run_workers(
    workers: int,
    models: Sequence[str],
    device_type: str,
    rounds: int,
    seconds: float,
    output: Output,
) -> None:
    """Measures training over workers of one device; publishes the report."""
    sizes = [loops.size_of(name) for name in models]
    settings = loops.settings_of(sizes, [(f"{device_type}:0",) * workers])
    if device_type == "gpu":
        _share_gpus(workers)
    native_workers = get_benchmarks(_LACK).native_workers
    if native_workers is None:
        raise lacking(_LACK)
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    title = f"{', '.join(models)}, {workers} workers"
    arguments = settings, rounds, seconds
    ((measured, *_),) = measure.in_turn(
        {
            title: lambda _: launch(
                measure_on_worker,
                arguments,
                workers=workers,
                devices=1 if device_type == "cpu" else None,
            )
        }
    )
    output.publish(report_of_workers(measured, native_workers.text, load))


def _share_gpus(workers: int) -> None:
    """Lets workers see no more than one GPU each."""
    found = gpus(os.environ)
    if len(found) < workers:
        raise DeviceError(
            f"Each worker needs a GPU of its own. Received: {workers} workers, "
            f"and {len(found) or 'no'} GPUs. Expected: --workers of at most "
            "the number of GPUs, or --device cpu."
        )
    os.environ[VISIBLE] = ",".join(found[:workers])


def report_of_workers(
    measured: Sequence[measure.Measurement],
    native: str,
    load: list[float] | None,
) -> BenchReport:
    """Returns the report: ratios, then times and traffic, then explanations."""
    text = [ARMS]
    if load is not None:
        text.insert(
            0,
            f"Load: {load[0]:.2f} in the minute before; the workers add "
            "theirs. If other programs are running, the ratios mostly "
            "measure waiting.",
        )
    return report_of("workers", measured, native, text, load=load)


def measure_on_worker(
    settings: Sequence[loops.Setting], rounds: int, seconds: float
) -> list[measure.Measurement]:
    """Measures all settings; each worker calls it."""
    strategy = MultiWorkerMirroredStrategy()
    _check_devices(strategy, settings[0])
    workers = strategy.executor.workers
    native_workers = get_benchmarks(_LACK).native_workers
    # `run_workers` starts several workers, where there is such a class.
    assert workers is not None and native_workers is not None
    native = native_workers(workers)
    try:
        return [
            _measure(strategy, workers, native, setting, rounds, seconds)
            for setting in settings
        ]
    finally:
        native.close()


def _check_devices(strategy: Strategy, setting: loops.Setting) -> None:
    """Raises `DeviceError` unless this worker has the setting's device."""
    own = [str(device) for device in strategy.plan.devices]
    wanted = setting.devices[0]
    if own != [wanted]:
        raise DeviceError(
            "A worker computes elsewhere than it was told to. Received: "
            f"{', '.join(own)}. Expected: '{wanted}'. Install the framework's "
            "build for GPUs, or choose --device cpu."
        )


def _measure(
    strategy: Strategy,
    workers: Workers,
    native: NativeWorkers,
    setting: loops.Setting,
    rounds: int,
    seconds: float,
) -> measure.Measurement:
    own_rows = setting.rows_of(workers.cluster.index)
    arms: dict[str, loops.Loop] = {
        "native": native.loop(setting),
        "ours": loops.batch_loop(setting, setting.batches(), strategy.scope),
        "again": native.loop(setting),
        "run": PortableLoop(setting, strategy=strategy),
        FIT: FitLoop(task_of(setting.size), strategy.scope),
        **native.other_loops(setting),
        ALONE: loops.batch_loop(setting, own_rows, runs_in=alone_on_purpose),
    }
    losses = {
        name: _mean(workers, arm.run(measure.COUNTED_STEPS))
        for name, arm in arms.items()
    }
    measure.check_losses(losses, others=(ALONE, FIT))
    traffic = _traffic(native, setting, arms)
    # A worker that ran fewer steps would leave the others waiting.
    own_steps = measure.steps_in(arms["native"], seconds)
    steps = int(workers.concatenate_numbers([own_steps])[0])

    def meet() -> None:
        workers.concatenate_numbers([steps])

    times = measure.time_arms(arms, steps, rounds, lambda: None, on_block=meet)
    return measure.Measurement(
        setting, steps, times, losses, traffic, measure.pairs_of(arms)
    )


def _mean(workers: Workers, loss: float) -> float:
    """Returns the mean over workers, whose numbers of rows are equal."""
    # The bits are sent as integers, so that the loss stays exact.
    halves = np.array([loss], "float64").view("int32")
    found = np.array(workers.concatenate_numbers(list(halves)), "int32")
    return float(found.view("float64").mean())


def _traffic(
    native: NativeWorkers,
    setting: loops.Setting,
    arms: Mapping[str, loops.Loop],
) -> dict[str, dict[str, float | None]]:
    gradients = sum(each.nbytes for each in setting.weights())
    count = setting.num_replicas
    least = 2 * (count - 1) / count * gradients
    partial = functools.partial
    # GPUs send by other ways than TCP.
    on_cpus = setting.devices[0].startswith("cpu:")
    sent_in = _sent_in if on_cpus else _not_counted
    return {
        "collectives": {
            name: _a_step(partial(native.collectives, arm), 2)
            for name, arm in arms.items()
        },
        "bytes_sent": {
            name: _a_step(partial(sent_in, arm), measure.COUNTED_STEPS)
            for name, arm in arms.items()
        },
        "least_bytes": {name: 0.0 if name == ALONE else least for name in arms},
    }


def _a_step(in_steps: Callable[[int], int | None], steps: int) -> float | None:
    """Counts once workers have learned how many sums come in a row."""

    def learned(steps: int) -> int | None:
        *_, found = [in_steps(steps) for _ in range(3)]
        return found

    return measure.a_step(learned, steps)


def _not_counted(arm: loops.Loop, steps: int) -> None:
    """Counts nothing, on all workers alike."""


def _sent_in(arm: loops.Loop, steps: int) -> int | None:
    before = measure.bytes_sent()
    arm.run(steps)
    after = measure.bytes_sent()
    return None if before is None or after is None else after - before
