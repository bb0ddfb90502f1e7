"""`fit` with and without a strategy, beside the framework's own training."""

import contextlib

import keras_dist
from bench import settings
from bench.native import native
from keras_dist.bench import measure
from keras_dist.bench import report
from keras_dist.bench.fit import measure_fit

# Arms whose calls are in other processes.
ELSEWHERE = ("DDP", "processes")


def run(options):
    measured = []
    for setting in settings.on_replicas(options):
        with measure.progress(setting.title, options.rounds) as on_round:
            measured.append(_measured(setting, options, on_round))
    return settings.published(
        "fit",
        measured,
        native().FITS_TEXT,
        "Ours: `fit` under `MirroredStrategy`.",
        report.NOTE,
    )


def _measured(setting, options, on_round):
    task = setting.task()
    with contextlib.ExitStack() as stack:
        measured = measure_fit(
            task,
            keras_dist.MirroredStrategy(setting.devices),
            "ours",
            options.rounds,
            options.block_ms / 1e3,
            on_round,
            native().native_fits(task, setting.devices, stack),
        )
    for name in ELSEWHERE:
        measured.counts["calls"].pop(name, None)
    settings.check_losses(measured)
    return measured
