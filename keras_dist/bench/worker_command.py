"""The part of `keras-dist bench workers` that uses Keras."""

import os
from collections.abc import Sequence

from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.benchmarks import lacking
from keras_dist.bench.command import check_shares
from keras_dist.bench.command import size_of
from keras_dist.bench.loops import Setting
from keras_dist.bench.output import BenchReport
from keras_dist.bench.output import Output
from keras_dist.bench.output import report_of
from keras_dist.bench.progress import in_turn
from keras_dist.bench.worker_measure import LACK
from keras_dist.bench.worker_measure import WorkersResult
from keras_dist.bench.worker_measure import measure_on_worker
from keras_dist.launch.function import launch

ARMS = (
    "N: workers, all on this machine's CPUs. Ours: `train_on_batch`, the step "
    "of `fit`, under `MultiWorkerMirroredStrategy`, each worker given the "
    "global batch. Run: `strategy.run` of a `keras_dist.function`, with "
    "batches cut before. Keras: `train_on_batch` without a strategy, of a "
    "worker's rows: no worker waits for another. Sent: by the first worker "
    "over TCP; least: what an all-reduce of the gradients has to send."
)


def run_workers(
    workers: int,
    models: Sequence[str],
    rounds: int,
    seconds: float,
    output: Output,
) -> None:
    """Measures training over workers beside the framework's own; shows ratios.

    Each worker has one CPU device. A block takes about `seconds`, and each arm
    has `rounds` of them.

    Raises:
        ValueError: If a model is unknown, or can't be cut into equal shares.
        KerasDistError: If the native distribution can't be had, or if the
            arms don't compute the same.
    """
    sizes = [size_of(name) for name in models]
    settings = [Setting(size, ("cpu:0",) * workers) for size in sizes]
    check_shares(settings)
    if get_benchmarks(LACK).native_workers is None:
        raise lacking(LACK)
    before = load()
    title = f"{', '.join(models)}, {workers} workers"

    def start(on_round: object) -> WorkersResult:
        found: list[WorkersResult] = launch(
            measure_on_worker,
            (settings, rounds, seconds),
            workers=workers,
            devices=1,
        )
        return found[0]

    (result,) = in_turn({title: start})
    output.publish(report_of_workers(result, before))


def load() -> list[float] | None:
    """Returns the load averages over 1, 5 and 15 minutes, or `None`."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def report_of_workers(
    result: WorkersResult, before: list[float] | None
) -> BenchReport:
    """Returns the report: ratios, then times and traffic, then explanations.

    `before` is the result of `load` before the workers were started.
    """
    text = [ARMS]
    if before is not None:
        text.insert(
            0,
            f"Load: {before[0]:.2f} in the minute before; the workers add "
            "theirs. With other programs at work, ratios are those of waiting.",
        )
    return report_of(
        "workers", result.measured, result.native_text, text, load=before
    )
