"""Training over workers, beside the framework's own distribution."""

import functools
import os
import socket
import struct
import sys

import numpy as np

import keras_dist
from bench import dear
from bench import settings
from bench.loops import PortableLoop
from bench.native import native
from keras_dist.bench import measure
from keras_dist.bench.fit import FitArm
from keras_dist.environment.machine import VISIBLE
from keras_dist.environment.machine import gpus
from keras_dist.plugin.membership import alone_on_purpose

NOTE = (
    "N: workers, all on this machine. Ours: `train_on_batch`, the "
    "step of `fit`, under `MultiWorkerMirroredStrategy`, each worker given "
    "the global batch. Run: `strategy.run` of a `keras_dist.function`, with "
    "batches that were split before. Fit: a step of `fit` on NumPy arrays, "
    "without what a call takes to start. Model 'input': rows take 5 ms each "
    "to load, ours is `fit` over all workers, and native is `fit` of plain "
    "Keras in one process. Keras: `train_on_batch` without a "
    "strategy, of a worker's rows: no worker waits for another. Sent: by the "
    "first worker over TCP, not counted for GPUs; least: what an all-reduce "
    "of the gradients has to send."
)
# The arm in which workers don't wait for each other.
ALONE = "Keras"
# The arm whose loss is the mean of all steps, not the last one's.
FIT = "fit"

# The offset of `tcpi_bytes_sent`, an unsigned 64 bit integer, in Linux'
# `struct tcp_info`, and the bytes to read of that.
_FOLDER, _OFFSET, _SIZE = "/proc/self/fd", 200, 256


def run(options):
    count, is_gpu = options.workers, options.device == "gpu"
    devices = (f"{options.device}:0",) * count
    chosen = settings.settings_of(options.models, [devices])
    if is_gpu:
        found = gpus(os.environ)
        if len(found) < count:
            raise SystemExit(f"{count} workers need a GPU each, of {found}.")
        os.environ[VISIBLE] = ",".join(found[:count])
    load = os.getloadavg()
    title = f"{', '.join(options.models)}, {count} workers"
    with measure.progress(title, None):
        measured, *_ = keras_dist.launch(
            measured_on_worker,
            (chosen, options.rounds, options.block_ms / 1e3),
            workers=count,
            devices=None if is_gpu else 1,
        )
    return settings.published(
        "workers",
        measured,
        native().NativeWorkers.text,
        f"Load: {load[0]:.2f} in the minute before; the workers add theirs. "
        "If other programs are running, the ratios mostly measure waiting.",
        NOTE,
        load=load,
    )


def measured_on_worker(chosen, rounds, seconds):
    """Measures all settings; each worker calls it."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    own = tuple(map(str, strategy.plan.devices))
    assert own == chosen[0].devices[:1], own
    theirs = native().NativeWorkers(strategy.executor.workers)
    try:
        return [
            _measured(strategy, theirs, setting, rounds, seconds)
            for setting in chosen
        ]
    finally:
        theirs.close()


def _measured(strategy, theirs, setting, rounds, seconds):
    if setting.name == dear.NAME:
        return dear.measured(strategy, setting, rounds)
    workers = strategy.executor.workers
    own_rows = setting.rows_of(workers.cluster.index)
    arms = {
        "native": theirs.loop(setting),
        "ours": settings.BatchLoop(setting, setting.batches(), strategy.scope),
        measure.AGAIN: theirs.loop(setting),
        "run": PortableLoop(setting, strategy=strategy),
        FIT: FitArm(setting.task(), strategy.scope),
        **theirs.other_loops(setting, strategy),
        ALONE: settings.BatchLoop(setting, own_rows, runs_in=alone_on_purpose),
    }
    losses = {
        name: _mean(workers, arm(settings.COUNTED_STEPS))
        for name, arm in arms.items()
    }
    traffic = _traffic(theirs, setting, arms)
    # A worker that ran fewer steps would leave the others waiting.
    own_steps = settings.steps_in(arms["native"], seconds)
    steps = int(workers.concatenate_numbers([own_steps])[0])

    def meet():
        workers.concatenate_numbers([steps])

    times = measure.time_arms(
        arms,
        steps,
        rounds,
        lambda: None,
        on_block=meet,
        with_start=[name for name in arms if name.startswith(FIT)],
    )
    measured = settings.measurement(setting, steps, times, losses, traffic)
    fits = [name for name in arms if name.startswith(FIT)]
    settings.check_losses(measured, ALONE, *fits)
    return measured


def _mean(workers, loss):
    """Returns the mean over workers, whose numbers of rows are equal."""
    # The bits are sent as integers, so that the loss stays exact.
    halves = np.array([loss], "float64").view("int32")
    found = np.array(workers.concatenate_numbers(list(halves)), "int32")
    return float(found.view("float64").mean())


def _traffic(theirs, setting, arms):
    gradients = sum(each.nbytes for each in setting.weights())
    count = setting.num_replicas
    least = 2 * (count - 1) / count * gradients
    # GPUs send by other ways than TCP.
    sent_in = _sent_in if setting.devices[0] == "cpu:0" else _not_counted
    return {
        "collectives": {
            name: _a_step(functools.partial(theirs.collectives, arm), 2)
            for name, arm in arms.items()
        },
        "bytes_sent": {
            name: _a_step(
                functools.partial(sent_in, arm), settings.COUNTED_STEPS
            )
            for name, arm in arms.items()
        },
        "least_bytes": {name: 0.0 if name == ALONE else least for name in arms},
    }


def _a_step(in_steps, steps):
    """Returns the count that one step adds, without a block's fixed count."""

    def learned(steps):
        # Workers learn how many sums come in a row.
        return [in_steps(steps) for _ in range(3)][-1]

    few, many = learned(steps), learned(2 * steps)
    if few is None or many is None:
        return None
    # The difference is negative if a socket was closed meanwhile: its bytes are
    # not counted any more.
    return max(0.0, (many - few) / steps)


def _not_counted(arm, steps):
    """Counts nothing, on all workers alike."""


def _sent_in(arm, steps):
    before = bytes_sent()
    arm(steps)
    return None if before is None else bytes_sent() - before


def bytes_sent():
    """Returns the bytes sent by all open TCP sockets, if the system tells."""
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir(_FOLDER):
        try:
            if not os.readlink(f"{_FOLDER}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                info = one.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE
                )
        except OSError:  # closed meanwhile, or not TCP
            continue
        total += struct.unpack_from("Q", info, _OFFSET)[0]
    return total
