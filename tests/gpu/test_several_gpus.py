"""Two GPUs have the numbers of one, and are fast in one or two processes."""

import os
import signal

import keras
import numpy as np
import pytest

import keras_dist
from gpu import bench
from gpu import memory
from gpu import models
from gpu import numbers
from gpu import places
from gpu import worker_jobs
from keras_dist.environment import machine
from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.launch.addresses import free_addresses
from workers import faults

BACKEND = keras.backend.backend()
NO_SHARDS = "Others shard no optimizer's state in one process."


@pytest.fixture(autouse=True)
def _two_gpus():
    missing = places.lack(2)
    if missing:
        pytest.skip(missing)


def mirrored(**settings):
    return keras_dist.MirroredStrategy(places.devices(2), **settings)


@pytest.mark.parametrize("kind", models.KINDS)
def test_mirrored(kind):
    found = numbers.trained(mirrored(), kind)
    with numbers.plain_keras():
        expected = numbers.trained(None, kind)
    numbers.assert_same(numbers.state_of(*found), numbers.state_of(*expected))


@pytest.mark.only_on("jax", reason=NO_SHARDS)
@pytest.mark.parametrize("kind", models.KINDS)
def test_sharded_state(kind):
    strategy = mirrored(optimizer_state="sharded")
    model, history = numbers.trained(strategy, kind)
    weights = {v.path: models.to_numpy(v) for v in model.weights}
    with numbers.plain_keras():
        plain, _ = numbers.trained(None, kind)
    expected = {v.path: models.to_numpy(v) for v in plain.weights}
    numbers.assert_same(weights, expected)
    assert len(history["loss"]) == numbers.EPOCHS


@pytest.mark.only_on("jax", reason=NO_SHARDS)
def test_sharded_state_takes_less_memory(facts):
    held = {}
    for state in ("mirrored", "sharded"):
        with numbers.plain_keras():
            empty = keras.Sequential([keras.Input((1,))])
        before = memory.held(empty)
        with mirrored(optimizer_state=state).scope():
            model = keras.Sequential(
                [keras.Input((256,)), keras.layers.Dense(1024)]
            )
            model.compile("adam", "mse")
        x = np.ones((8, 256), "float32")
        model.fit(x, np.ones((8, 1024), "float32"), verbose=0)
        held[state] = memory.held(model) - before
        facts.measured(f"bytes on a GPU of two, {state}", held[state], "bytes")
        del model
    assert held["sharded"] < 0.75 * held["mirrored"]


@pytest.mark.parametrize("state", ["mirrored", "sharded"])
def test_workers(state):
    """A worker for each GPU: over NCCL, or gloo in a rehearsal."""
    if BACKEND == "tensorflow" and state == "sharded":
        pytest.skip("TensorFlow shards no optimizer's state.")
    found = keras_dist.launch(
        worker_jobs.fit,
        ("mlp", "AUTO", state),
        workers=2,
        devices=1 if places.IS_REHEARSAL else None,
        timeout=400,
    )
    with numbers.plain_keras():
        plain, history = numbers.trained(None, "mlp")
    expected = numbers.state_of(plain, history)
    for values, devices in found:
        assert devices == [places.DEVICE]
        numbers.assert_same(values, expected)


def test_time(tmp_path, facts):
    """Notes the times of two GPUs beside one, and beside the framework's."""
    for setting in bench.measured(tmp_path, "fit", "--replicas", "2"):
        bench.note(facts, setting, "Keras")
        assert setting["devices"] == places.devices(2)
        if facts.is_shown(
            f"time beside the framework's own, {setting['model']}",
            "a rehearsal measures too briefly, and no GPU",
        ):
            assert _beside_native(setting) <= 1.05


def _beside_native(setting):
    """Returns the ratio to the framework's own distribution, if it has one."""
    names = [row["name"] for row in setting["comparisons"]]
    known = ("ours/DataParallel", "ours/Mirrored")
    return min(
        (bench.ratio(setting, name) for name in names if name in known),
        default=0.0,
    )


def test_time_of_workers(tmp_path, facts):
    """Notes the times of a worker for each GPU, beside DDP and the like."""
    for setting in bench.measured(tmp_path, "workers", "--workers", "2"):
        bench.note(facts, setting, "native")
        assert setting["devices"] == [places.DEVICE] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_named(victim):
    """The other one waits in NCCL, and neither hangs nor uses its sums."""
    addresses = free_addresses(2)
    workers = [
        faults.Worker(
            index,
            addresses,
            "step" if index == victim else "nowhere",
            variables=_one_device(index),
        )
        for index in range(2)
    ]
    try:
        faults.go(*workers)
        workers[victim].wait_for("here")
        workers[victim].process.send_signal(signal.SIGKILL)
        status, seconds = workers[1 - victim].end()
    finally:
        for worker in workers:
            worker.close()
    faults.assert_names(workers[1 - victim], victim)
    assert status == RESTART_EXIT_CODE
    assert seconds < 120


def _one_device(index):
    """Returns the variables that give a worker a GPU of its own."""
    if places.IS_REHEARSAL:
        return faults.ONE_CPU
    return {machine.VISIBLE: machine.gpus(os.environ)[index]}
