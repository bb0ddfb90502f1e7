"""After SIGTERM, one worker saves, ends, and goes on where it was."""

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import signal
import types

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from keras_dist import errors
from keras_dist.cluster_resolver import ClusterSpec
from keras_dist.cluster_resolver import SimpleClusterResolver
from keras_dist.experimental import PreemptionCheckpointHandler
from keras_dist.experimental import TerminationConfig
from keras_dist.tools import preemption


@pytest.fixture(autouse=True)
def _signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def model_of():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def train(model):
    x = np.ones((4, 2), "float32")
    return model.fit(x, x[:, :1], verbose=0).history["loss"][0]


class Saved:
    """An object that can be saved under a name."""

    def __init__(self):
        self.value = 0.0

    def save(self, path):
        pathlib.Path(path).write_text(str(self.value))

    def load(self, path):
        self.value = float(pathlib.Path(path).read_text())


class NumberedSaved(Saved):
    """As a `tf.train.Checkpoint`: it says where it was saved."""

    load, restore = None, Saved.load

    def save(self, path):
        super().save(f"{path}-1")
        return f"{path}-1"


class Manager:
    """As a `tf.train.CheckpointManager`."""

    latest_checkpoint = None

    def __init__(self, checkpoint, directory):
        self.checkpoint = checkpoint
        self.directory = directory

    def save(self, checkpoint_number=0):
        path = os.path.join(self.directory, f"by-manager-{checkpoint_number}")
        return self.checkpoint.save(path)


def ends(handler, *call):
    """Ends the process, as it would without the test."""
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        handler.run(*call)
    assert end.value.code == errors.RESTART_EXIT_CODE


EMPTY = [lambda: None, lambda: SimpleClusterResolver(ClusterSpec({}))]


@contract("F-1", native=False)
@pytest.mark.parametrize("resolver", EMPTY)
def test_calls_are_counted(resolver, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    handler = PreemptionCheckpointHandler(resolver(), model_of(), tmp_path)
    for number in range(3):
        assert handler.run(lambda a, b: a + b, number, b=1) == number + 1
    with pytest.raises(ZeroDivisionError):
        handler.run(lambda: 1 / 0)
    assert handler.total_run_calls == 3
    assert not os.listdir(tmp_path)
    # The handler of the signal is given back.
    assert signal.getsignal(signal.SIGTERM) is not before
    for _ in range(2):
        handler.stop_watching()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("in_scope", [False, True])
def test_a_model_goes_on_where_it_was(in_scope, tmp_path):
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])

    def handled():
        keras.utils.set_random_seed(1)
        scope = strategy.scope() if in_scope else contextlib.nullcontext()
        with scope:
            model = model_of()
        return model, PreemptionCheckpointHandler(None, model, tmp_path)

    keras.utils.set_random_seed(1)
    unbroken = model_of()
    expected = [train(unbroken) for _ in range(4)]
    model, handler = handled()
    handler.run(train, model)
    ends(handler, train, model)
    model, handler = handled()
    assert handler.total_run_calls == 2
    found = [handler.run(train, model) for _ in range(2)]
    np.testing.assert_allclose(found, expected[2:], rtol=1e-5)
    assert os.listdir(tmp_path) == ["preemption.weights.h5"]


@contract("F-5", native=False)
@pytest.mark.parametrize("kind", ["object", "checkpoint", "manager"])
def test_checkpoints_and_managers(kind, tmp_path):

    def handled():
        thing = Saved() if kind == "object" else NumberedSaved()
        given, folder = thing, str(tmp_path)
        if kind == "manager":
            given, folder = Manager(thing, str(tmp_path)), None
        return thing, PreemptionCheckpointHandler(None, given, folder)

    def add(thing):
        thing.value += 1

    for calls in (0, 2, 4):
        thing, handler = handled()
        assert (thing.value, handler.total_run_calls) == (calls, calls)
        handler.run(add, thing)
        ends(handler, add, thing)


def test_a_loop_of_its_own(tmp_path):
    """`save_checkpoint_if_preempted` alone, with its arguments."""
    manager = Manager(NumberedSaved(), str(tmp_path))
    handler = PreemptionCheckpointHandler(None, manager)
    for _ in range(2):
        handler.save_checkpoint_if_preempted(checkpoint_number=5)
    assert handler.total_run_calls == 2
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        handler.save_checkpoint_if_preempted(checkpoint_number=5)
    assert "by-manager-5-1" in os.listdir(tmp_path)


def test_what_a_platform_says(tmp_path):
    """Its own notice, its own way to save, its own end."""
    told, done = [], []
    config = TerminationConfig(
        termination_watcher_fn=lambda: bool(told),
        exit_fn=lambda: done.append("exit"),
        save_fn=lambda: done.append("save"),
    )
    before = signal.getsignal(signal.SIGTERM)
    handler = PreemptionCheckpointHandler(None, Saved(), tmp_path, config)
    assert signal.getsignal(signal.SIGTERM) is before
    told.append(True)
    handler.run(int)
    assert done == ["save", "exit"]


@contract("F-3", native=False)
def test_a_grace_period_ends_in_a_second_checkpoint(tmp_path, monkeypatch):
    # Each look at the clock takes a hundredth of a second.
    looks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(looks) / 100)
    monkeypatch.setattr(preemption, "time", clock)
    saved = []
    config = TerminationConfig(
        termination_watcher_fn=lambda: True,
        save_fn=lambda: saved.append(handler.total_run_calls),
        grace_period=3.0,
    )
    handler = PreemptionCheckpointHandler(None, Saved(), tmp_path, config)
    with pytest.raises(SystemExit):
        while True:
            handler.run(int)
    assert saved[0] == 1
    assert len(saved) == 2
    assert saved[1] > 10


@contract("F-5", native=False)
def test_parameter_servers_are_refused(tmp_path):
    spec = ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]})
    resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)
    with pytest.raises(NotImplementedError, match="parameter servers"):
        PreemptionCheckpointHandler(resolver, model_of(), tmp_path)


@pytest.mark.parametrize(
    ("thing", "folder", "message"),
    [
        (Saved, None, "must say where to save"),
        (object, "here", "an object with `save"),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), "x", "not built"),
    ],
)
def test_what_can_not_be_saved(thing, folder, message):
    with pytest.raises(ValueError, match=message):
        PreemptionCheckpointHandler(None, thing(), folder)


def test_only_the_main_thread_hears_signals(tmp_path):
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="only in the main thread"),
    ):
        make = PreemptionCheckpointHandler
        pool.submit(make, None, Saved(), tmp_path).result()
