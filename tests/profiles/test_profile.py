"""`strategy.profile` records the steps that it is asked for, and no others."""

import json
import shutil
import warnings

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import UnsupportedBackendError
from keras_dist.plugins import get_backend
from keras_dist.plugins import override_backend
from keras_dist.testing import MemoryBackend
from parity import harness
from profiles.steps import recorded

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
STEPS = 6  # of an epoch
SEVERAL_STEPS = pytest.mark.only_on(
    *("jax", "tensorflow"), reason="Keras has one step in a call on PyTorch"
)


def _model(strategy, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.Adam(0.1),
            "mse",
            jit_compile=harness.JIT,
            **options,
        )
    return model


def _fit(model, *callbacks, epochs=2, **options):
    return model.fit(
        X,
        Y,
        batch_size=len(X) // STEPS,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
        **options,
    )


class FailsAt(keras.callbacks.Callback):
    """Fails at the end of a batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise KeyboardInterrupt


def _two_replicas():
    # No fixture: its threads end with the test.
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def test_the_steps_of_fit_across_epochs(tmp_path):
    strategy = _two_replicas()
    profile = strategy.profile(tmp_path / "new" / "traces", steps=(4, 8))
    _fit(_model(strategy), profile)
    folder = tmp_path / "new" / "traces" / "worker-0"
    assert profile.directory == str(folder)
    assert recorded(folder) == [4, 5, 6, 7]


def test_the_numbers_stay_the_same(tmp_path):
    strategy = _two_replicas()
    found = []
    for callbacks in [], [strategy.profile(tmp_path, steps=(1, 3))]:
        model = _model(strategy)
        history = _fit(model, *callbacks, validation_data=(X, Y)).history
        found.append((history, [w.tolist() for w in model.get_weights()]))
    assert found[0] == found[1]


def test_each_fit_is_recorded_as_far_as_it_goes(tmp_path):
    strategy = keras_dist.OneDeviceStrategy("cpu:0")
    model = _model(strategy)
    profile = strategy.profile(str(tmp_path), steps=[4, 20])
    for _ in range(2):
        _fit(model, profile, epochs=1)
        assert recorded(tmp_path) == [4, 5]
        # Names of traces have the second, and the next is the same one.
        shutil.rmtree(tmp_path)


@SEVERAL_STEPS
def test_calls_with_several_steps_are_recorded_whole(tmp_path):
    strategy = _two_replicas()
    model = _model(strategy, steps_per_execution=3)
    _fit(model, strategy.profile(tmp_path, steps=(4, 7)))
    # Each event has the first of three steps.
    assert recorded(tmp_path) == [3, 6]


def test_what_is_in_the_context_is_recorded_without_steps(tmp_path):
    strategy = _two_replicas()
    model = _model(strategy)
    with strategy.profile(tmp_path) as profile:
        strategy.run(lambda: keras.ops.ones((4, 4)) @ keras.ops.ones((4, 4)))
        _fit(model, epochs=1)
    assert profile.directory == str(tmp_path / "worker-0")
    assert recorded(tmp_path) == []


@pytest.mark.only_on("torch", reason="elsewhere, replicas have no threads")
def test_the_threads_of_replicas_are_recorded(tmp_path):
    strategy = _two_replicas()
    _fit(_model(strategy), strategy.profile(tmp_path, steps=(2, 4)))
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    events = json.loads(path.read_text())["traceEvents"]
    matmuls = [e["tid"] for e in events if e.get("name") == "aten::mm"]
    assert len(set(matmuls)) == 2


def test_what_fails_ends_its_profile(tmp_path):
    strategy = _two_replicas()
    model = _model(strategy)
    # Whether the failed callback comes first makes no difference.
    for name, order in (("last", 1), ("first", -1)):
        profile = strategy.profile(tmp_path / name, steps=(1, 5))
        with pytest.raises(KeyboardInterrupt):
            _fit(model, *[profile, FailsAt(3)][::order])
        assert recorded(tmp_path / name) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError), strategy.profile(tmp_path / "a"):
        1 / 0  # noqa: B018
    _fit(model, strategy.profile(tmp_path / "next", steps=(0, 1)), epochs=1)
    assert recorded(tmp_path / "next") == [0]


def test_a_fit_that_is_too_short_warns_and_evaluate_does_not(tmp_path):
    strategy = _two_replicas()
    model = _model(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.evaluate(
            X, Y, verbose=0, callbacks=[strategy.profile(tmp_path, (0, 1))]
        )
    profile = strategy.profile(tmp_path, steps=(2 * STEPS, 99))
    with pytest.warns(UserWarning, match="a `fit` of 12 steps") as warned:
        _fit(model, profile)
    told = [str(each.message) for each in warned]
    (told,) = (each for each in told if each.startswith("Nothing was"))
    assert "Received: steps=(12, 99)" in told
    assert not list(tmp_path.iterdir())


def test_one_profile_at_a_time(tmp_path):
    strategy = _two_replicas()
    model = _model(strategy)
    message = r"one profile at a time.*traces-b.*while.*traces-a"
    with strategy.profile(tmp_path / "traces-a"):
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            _fit(model, strategy.profile(tmp_path / "traces-b", (0, 2)))
        with (
            pytest.raises(RuntimeError, match=f"(?s){message}"),
            strategy.profile(tmp_path / "traces-b"),
        ):
            pass
    # Each ends before the other begins.
    first = strategy.profile(tmp_path / "c", (0, 2))
    _fit(model, first, strategy.profile(tmp_path / "d", (3, 5)))
    assert recorded(tmp_path / "c") == [0, 1]
    assert recorded(tmp_path / "d") == [3, 4]


def test_a_profiler_that_runs_already(tmp_path, monkeypatch):
    strategy = _two_replicas()
    profiler = type(get_backend().profiler())

    def start(self, folder):
        raise OSError("made up")

    monkeypatch.setattr(profiler, "start", start)
    with (
        pytest.raises(RuntimeError, match="did not start: made up"),
        strategy.profile(tmp_path),
    ):
        pass
    monkeypatch.undo()
    with strategy.profile(tmp_path):
        pass


WRONG = [3, (3,), (1, 2, 3), (5, 5), (6, 5), (-1, 5), (0.0, 5)]


def test_arguments_that_can_not_be(tmp_path):
    strategy = _two_replicas()
    for steps in (*WRONG, (False, True), "12"):
        with pytest.raises(ValueError, match="(?s)Received: .*two integers"):
            strategy.profile(tmp_path, steps=steps)
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError, match="file', which is a file"):
        strategy.profile(path)
    with pytest.raises(TypeError, match="Received: None of type NoneType"):
        strategy.profile(None)
    # A context takes no steps.
    with (
        pytest.raises(ValueError, match=r"Received: steps=\(1, 2\)"),
        strategy.profile(tmp_path, steps=(1, 2)),
    ):
        pass


def test_a_model_of_another_strategy(tmp_path):
    strategy = _two_replicas()
    other = keras_dist.OneDeviceStrategy("cpu:0")
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    for model in _model(other), plain:
        with pytest.raises(StrategyMismatchError, match="of its own strategy"):
            _fit(model, strategy.profile(tmp_path))


def test_a_backend_without_a_profiler(tmp_path):
    with (
        override_backend(MemoryBackend()),
        pytest.raises(UnsupportedBackendError, match="has no profiler"),
    ):
        keras_dist.OneDeviceStrategy("cpu:0").profile(tmp_path)
