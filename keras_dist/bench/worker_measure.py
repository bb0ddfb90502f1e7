"""The measurement of settings on one worker of several; arms take turns."""

import functools
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_dist.bench.benchmarks import NativeWorkers
from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.measure import COUNTED_STEPS
from keras_dist.bench.measure import check_losses
from keras_dist.bench.measure import steps_in
from keras_dist.bench.measure import time_arms
from keras_dist.bench.measurement import Measurement
from keras_dist.bench.measurement import pairs_of
from keras_dist.bench.portable import PortableLoop
from keras_dist.bench.profile import a_step
from keras_dist.bench.sockets import bytes_sent
from keras_dist.bench.worker_loops import BatchLoop
from keras_dist.bench.worker_loops import rows_of
from keras_dist.plugin.workers import Workers
from keras_dist.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy,
)
from keras_dist.strategies.strategy import Strategy

# The arm in which workers don't wait for each other.
ALONE = "Keras"
LACK = "has no distribution over workers to compare with"


@dataclass(frozen=True)
class WorkersResult:
    """The result of one worker.

    `measured` has an item for each model; `native_text` describes the native
    loop.
    """

    measured: list[Measurement]
    native_text: str


def measure_on_worker(
    settings: Sequence[Setting], rounds: int, seconds: float
) -> WorkersResult:
    """Measures all settings; each worker calls it.

    Settings have one device of each worker. A block of the native loop takes
    about `seconds`, and each arm has `rounds` blocks.

    Raises:
        LossMismatchError: If the arms' losses differ.
    """
    strategy = MultiWorkerMirroredStrategy()
    workers = strategy.executor.workers
    native_workers = get_benchmarks(LACK).native_workers
    # `run_workers` starts several workers, where there is such a class.
    assert workers is not None and native_workers is not None
    native = native_workers(workers)
    try:
        return WorkersResult(
            [
                _measure(strategy, workers, native, setting, rounds, seconds)
                for setting in settings
            ],
            native.text,
        )
    finally:
        native.close()


def _measure(
    strategy: Strategy,
    workers: Workers,
    native: NativeWorkers,
    setting: Setting,
    rounds: int,
    seconds: float,
) -> Measurement:
    arms: dict[str, Loop] = {
        "native": native.loop(setting),
        "ours": BatchLoop(setting, setting.batches(), strategy),
        "again": native.loop(setting),
        "run": PortableLoop(setting, strategy=strategy),
        **native.other_loops(setting),
        ALONE: BatchLoop(
            setting, rows_of(setting, workers.cluster.index), None
        ),
    }
    losses = {
        name: _mean(workers, arm.run(COUNTED_STEPS))
        for name, arm in arms.items()
    }
    check_losses(losses, others=(ALONE,))
    traffic = _traffic(native, setting, arms)
    # A worker that ran fewer steps would leave the others waiting.
    own_steps = np.array([steps_in(arms["native"], seconds)], "int32")
    steps = int(workers.chief_value(own_steps)[0])

    def meet() -> None:
        workers.concatenate_numbers([steps])

    times = time_arms(arms, steps, rounds, lambda: None, on_block=meet)
    return Measurement(setting, steps, times, losses, traffic, pairs_of(arms))


def _mean(workers: Workers, loss: float) -> float:
    """Returns the mean over workers, whose numbers of rows are equal.

    The bits of the loss are sent as integers, so that it stays exact.
    """
    halves = np.array([loss], "float64").view("int32")
    found = np.array(workers.concatenate_numbers(list(halves)), "int32")
    return float(found.view("float64").mean())


def _traffic(
    native: NativeWorkers, setting: Setting, arms: Mapping[str, Loop]
) -> dict[str, dict[str, float | None]]:
    gradients = sum(each.nbytes for each in setting.weights())
    count = setting.num_replicas
    least = 2 * (count - 1) / count * gradients
    partial = functools.partial
    return {
        "collectives": {
            name: a_step(partial(native.collectives, arm), 2)
            for name, arm in arms.items()
        },
        "bytes_sent": {
            name: a_step(partial(_sent_in, arm), COUNTED_STEPS)
            for name, arm in arms.items()
        },
        "least_bytes": {name: 0.0 if name == ALONE else least for name in arms},
    }


def _sent_in(arm: Loop, steps: int) -> int | None:
    before = bytes_sent()
    arm.run(steps)
    after = bytes_sent()
    if before is None or after is None:
        return None
    return after - before
