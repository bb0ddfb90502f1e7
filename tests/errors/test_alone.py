"""A model that each of several workers would train alone is refused."""

import json
import warnings

import keras
import numpy as np
import pytest

import keras_dist
from errors.helpers import assert_weights
from keras_dist.fit.hooks import watch_training
from keras_dist.plugin import membership
from keras_dist.plugin.membership import alone_on_purpose

X = np.ones((4, 2), "float32")
STRATEGIES = {
    "none": None,
    "MirroredStrategy": lambda: keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "OneDeviceStrategy": lambda: keras_dist.OneDeviceStrategy("cpu:0"),
}


def two_addresses(monkeypatch):
    monkeypatch.setenv("KERAS_DIST_WORKERS", "127.0.0.1:9000,127.0.0.1:9001")
    monkeypatch.setenv("KERAS_DIST_WORKER_INDEX", "1")
    monkeypatch.delenv("KERAS_DIST_INDEPENDENT", raising=False)


def tf_config(task, index):
    cluster = {task: ["c:9000"], "worker": ["a:9000", "b:9000"]}
    place = {"type": task, "index": index}
    return json.dumps({"cluster": cluster, "task": place})


def made(name):
    """A model, made as a script does that knows nothing of workers."""
    watch_training()  # importing keras_dist calls it
    strategy = STRATEGIES[name]

    def model():
        it = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        it.compile("sgd", "mse")
        return it

    if strategy is None:
        return model()
    with strategy().scope():
        return model()


def fit(model):
    model.fit(X, X[:, :1], verbose=0)


def train_on_batch(model):
    model.train_on_batch(X, X[:, :1])


@pytest.mark.parametrize("train", [fit, train_on_batch])
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_refused_before_it_trains(monkeypatch, name, train):
    two_addresses(monkeypatch)
    model = made(name)
    before = model.get_weights()
    with pytest.raises(keras_dist.StrategyMismatchError) as raised:
        train(model)
    message = str(raised.value)
    assert "2 workers, this is worker 1" in message
    assert "MultiWorkerMirroredStrategy" in message
    assert "--independent" in message
    expected = "outside of any scope" if name == "none" else f"<{name}"
    assert expected in message
    assert_weights(model, before)


def test_what_trains_nothing_or_is_alone_on_purpose(monkeypatch):
    two_addresses(monkeypatch)
    model = made("none")
    model.predict(X, verbose=0)
    model.evaluate(X, X[:, :1], verbose=0)
    with alone_on_purpose():
        fit(model)
    monkeypatch.setenv("KERAS_DIST_INDEPENDENT", "1")
    fit(model)
    monkeypatch.delenv("KERAS_DIST_INDEPENDENT")
    monkeypatch.setenv("KERAS_DIST_WORKERS", "127.0.0.1:9000")
    monkeypatch.setenv("KERAS_DIST_WORKER_INDEX", "0")
    fit(model)


def test_one_device_is_deliberate_in_who_has_joined(monkeypatch, tmp_path):
    two_addresses(monkeypatch)
    monkeypatch.setattr(membership, "_joined", set())
    monkeypatch.setenv("KERAS_DIST_JOINED_FILE", str(tmp_path / "joined"))
    membership.note_joined()
    assert (tmp_path / "joined").exists()
    fit(made("OneDeviceStrategy"))
    with pytest.raises(keras_dist.StrategyMismatchError, match="made outside"):
        fit(made("none"))
    # A launcher that can't be told.
    monkeypatch.setattr(membership, "_joined", set())
    monkeypatch.setenv("KERAS_DIST_JOINED_FILE", str(tmp_path / "no" / "file"))
    with pytest.warns(UserWarning, match="--independent"):
        membership.note_joined()


LAUNCHERS = {
    "torchrun": {
        **{"RANK": "1", "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "a", "MASTER_PORT": "9000"},
    },
    "TF_CONFIG": {"TF_CONFIG": tf_config("worker", 1)},
    "SLURM": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", ["none", "MirroredStrategy"])
def test_other_launchers_get_a_warning(monkeypatch, launcher, name):
    for variable, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(variable, value)
    model = made(name)
    expected = "outside of any scope" if name == "none" else f"<{name}"
    with pytest.warns(UserWarning, match=expected) as caught:
        fit(model)
    assert any("2 workers, this is worker 1" in str(w.message) for w in caught)


@pytest.mark.parametrize("task", ["evaluator", "ps"])
def test_tasks_that_train_nothing_with_others(monkeypatch, task):
    monkeypatch.setenv("TF_CONFIG", tf_config(task, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(made("none"))
