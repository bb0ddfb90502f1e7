"""The part of `keras-dist bench fit` that uses Keras."""

import functools
from collections.abc import Sequence

from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.command import check_shares
from keras_dist.bench.command import groups_of_devices
from keras_dist.bench.command import size_of
from keras_dist.bench.fit_measure import measure_fit
from keras_dist.bench.loops import Setting
from keras_dist.bench.measurement import Measurement
from keras_dist.bench.output import Output
from keras_dist.bench.output import report_of
from keras_dist.bench.progress import in_turn
from keras_dist.bench.tasks import Task
from keras_dist.bench.tasks import task_of
from keras_dist.bench.tasks import users_task

ARMS = (
    "Ours: `fit` under `MirroredStrategy`. Keras: `fit` without a strategy, "
    "on the first device. All are fed with the same NumPy arrays. Python "
    "calls: in the thread that trains. Collectives: on PyTorch, where "
    "replicas are threads, how often they meet. Traced again: how often "
    "Python ran the step after the arm was warm. To send: what `keras-dist "
    "plan` computes. Live: what an arm added on all devices."
)
# The relative difference beyond which losses are not called the same.
_TOLERANCE = 1e-2


def run_fit(
    replicas: Sequence[int] | None,
    models: Sequence[str],
    users_model: tuple[str, int] | None,
    device_type: str,
    rounds: int,
    seconds: float,
    output: Output,
) -> None:
    """Measures `fit` with and without a strategy, beside the framework's own.

    `users_model` is `"module:function"` and a global batch, to measure too.
    `replicas` of `None` are all numbers that `groups_of_devices` chooses. A
    block takes about `seconds`, and each arm has `rounds` of them.

    Raises:
        ValueError: If a model is unknown, or can't be cut into equal shares.
        KerasDistError: If the devices or the native arms can't be had, or if
            the arms don't compute the same.
    """
    sizes = [size_of(name) for name in models]
    groups = groups_of_devices(replicas, device_type)
    benchmarks = get_benchmarks("has no training to compare with")
    tasks = [task_of(size) for size in sizes]
    if users_model is not None:
        tasks.append(users_task(*users_model))
    check_shares([Setting(t.size, each) for t in tasks for each in groups])
    jobs = {
        Setting(task.size, devices).title: functools.partial(
            measure_fit, benchmarks, task, devices, rounds, seconds
        )
        for task in tasks
        for devices in groups
    }
    measured = in_turn(jobs, rounds)
    text = [ARMS, *_notes(tasks, measured)]
    if benchmarks.live_bytes_text is not None:
        text.append(benchmarks.live_bytes_text)
    output.publish(report_of("fit", measured, benchmarks.fits_text, text))


def _notes(tasks: Sequence[Task], measured: Sequence[Measurement]) -> list[str]:
    """Returns sentences on losses of users' models that differ between arms."""
    known = {task.size.name for task in tasks if task.is_known}
    notes = []
    for each in measured:
        losses = each.losses
        expected = losses[each.base]
        far = [
            f"{name} {loss:.4f}"
            for name, loss in losses.items()
            if not abs(loss - expected) <= _TOLERANCE * abs(expected)
        ]
        if far and each.setting.size.name not in known:
            notes.append(
                f"Losses after the first steps of {each.setting.title} "
                f"differ: {each.base} {expected:.4f}, {', '.join(far)}. With "
                "ours, layers that draw random numbers do that, or it is a "
                "bug; the framework's own arms may, for one, normalize "
                "batches by a replica's rows only."
            )
    return notes
