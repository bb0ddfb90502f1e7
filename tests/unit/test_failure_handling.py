"""`PreemptionCheckpointHandler` where there is one worker."""

import itertools
import os
import signal
import threading
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
        with open(path, "w") as file:
            file.write(str(self.value))

    def load(self, path):
        with open(path) as file:
            self.value = float(file.read())


class NumberedSaved(Saved):
    """As a `tf.train.Checkpoint`: it says where it was saved."""

    load = None

    def save(self, path):
        super().save(f"{path}-1")
        return f"{path}-1"

    def restore(self, path):
        Saved.load(self, path)


class Manager:
    """As a `tf.train.CheckpointManager`."""

    latest_checkpoint = None

    def __init__(self, checkpoint, directory):
        self.checkpoint = checkpoint
        self.directory = directory

    def save(self, checkpoint_number=0):
        path = os.path.join(self.directory, f"by-manager-{checkpoint_number}")
        return self.checkpoint.save(path)


EMPTY = [lambda: None, lambda: SimpleClusterResolver(ClusterSpec({}))]


@contract("F-1", native=False)
@pytest.mark.parametrize("resolver", EMPTY)
def test_calls_are_counted(resolver, tmp_path):
    handler = PreemptionCheckpointHandler(resolver(), model_of(), tmp_path)
    for number in range(3):
        assert handler.run(lambda a, b: a + b, number, b=1) == number + 1
    assert handler.total_run_calls == 3
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("in_scope", [False, True])
def test_a_model_goes_on_where_it_was(in_scope, tmp_path):
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])

    def handled():
        keras.utils.set_random_seed(1)
        if in_scope:
            with strategy.scope():
                model = model_of()
        else:
            model = model_of()
        return model, PreemptionCheckpointHandler(None, model, tmp_path)

    keras.utils.set_random_seed(1)
    unbroken = model_of()
    expected = [train(unbroken) for _ in range(4)]
    model, handler = handled()
    handler.run(train, model)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        handler.run(train, model)
    assert end.value.code == errors.RESTART_EXIT_CODE
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
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            handler.run(add, thing)


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


def test_an_error_is_raised_as_it_is_and_not_counted(tmp_path):
    handler = PreemptionCheckpointHandler(None, Saved(), tmp_path)
    with pytest.raises(ZeroDivisionError):
        handler.run(lambda: 1 / 0)
    assert handler.total_run_calls == 0


def test_sigterm_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    handler = PreemptionCheckpointHandler(None, Saved(), tmp_path)
    assert signal.getsignal(signal.SIGTERM) is not before
    handler.stop_watching()
    handler.stop_watching()
    assert signal.getsignal(signal.SIGTERM) is before


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
    failures = []

    def make():
        try:
            PreemptionCheckpointHandler(None, Saved(), tmp_path)
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "only in the main thread" in failures[0]
