"""`keras-dist bench workers`, once the backend is chosen."""

import pathlib
from collections.abc import Sequence

import keras
from rich.console import Console

from keras_dist.backend import get_backend
from keras_dist.errors import BackendNotFoundError
from keras_dist.launch.bench.command import size_of
from keras_dist.launch.bench.report import write_json
from keras_dist.launch.bench.worker_loops import BenchmarksWorkers
from keras_dist.launch.bench.worker_measure import measure_on_worker
from keras_dist.launch.bench.worker_report import load
from keras_dist.launch.bench.worker_report import show_workers
from keras_dist.launch.bench.worker_report import workers_json
from keras_dist.launch.function import launch


def run_workers(
    workers: int,
    models: Sequence[str],
    rounds: int,
    seconds: float,
    json_path: pathlib.Path | None,
) -> None:
    """Measures our steps over workers and the backend's own, shows ratios.

    Args:
        workers: Integer, how many to start; each has one CPU device.
        models: Sequence of names in `MODELS`.
        rounds: Integer, blocks of each arm.
        seconds: Float, what a block takes about.
        json_path: Path of the file to write, or `None`.

    Raises:
        ValueError: If a model is unknown, or can't be cut into equal shares.
        KerasDistError: If the native distribution can't be had, or if the
            arms don't compute the same.
    """
    sizes = [size_of(name) for name in models]
    for size in sizes:
        if size.rows % workers:
            raise ValueError(
                f"The {size.rows} rows of '{size.name}' can't be cut into "
                f"equal shares. Received: {workers} workers. Expected: a "
                f"number that divides {size.rows}, such as 2 or 4."
            )
    if not isinstance(get_backend(), BenchmarksWorkers):
        raise BackendNotFoundError(
            f"The plugin of the backend '{keras.backend.backend()}' has no "
            "distribution over workers to compare with. Received: "
            f"{get_backend()!r}. Expected: a `BenchmarksWorkers`. Choose "
            "another backend with --backend."
        )
    before = load()
    results = launch(
        measure_on_worker, (sizes, rounds, seconds), workers=workers, devices=1
    )
    show_workers(Console(highlight=False), results[0], before)
    if json_path is not None:
        write_json(json_path, workers_json(results[0], before))
