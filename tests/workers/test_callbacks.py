"""On several workers, callbacks write on the chief, and all decide the same."""

import contextlib
import io
import os
import random

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from workers.clusters import on_workers
from workers.jobs import attempted

pytestmark = pytest.mark.runs_on("torch")
ROWS = 21
FIT = {"batch_size": 4, "verbose": 0}


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def plain_model(**options):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
    )
    options = {"loss": "mse", "metrics": ["mae"], **options}
    model.compile(keras.optimizers.Adam(0.05), **options)
    return model


def made(**options):
    """A model of all workers, and this worker's index.

    Python's and NumPy's generators differ; the strategy makes them the same.
    """
    index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
    random.seed(index)
    np.random.seed(index)
    with keras_dist.MultiWorkerMirroredStrategy().scope():
        return plain_model(**options), index


def weights(model):
    return [weight.tolist() for weight in model.get_weights()]


class OwnCheckpoint(keras.callbacks.ModelCheckpoint):
    """A user's subclass of a callback that writes."""


class OwnCallback(keras.callbacks.Callback):
    """A user's own callback, which runs on every worker."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.batches = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, logs["loss"]))
        self.model.predict(data()[0])  # shows progress by default

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)


@contract(227, native=False)
@on_workers()
def test_only_the_chief_shows_progress_and_writes(tmp_path):
    model, index = made()
    folder = tmp_path / str(index)
    folder.mkdir()
    own = OwnCallback()
    last, step = folder / "last.weights.h5", folder / "step.weights.h5"
    callbacks = [
        OwnCheckpoint(folder / "{epoch}.keras", verbose=1),
        keras.callbacks.ModelCheckpoint(last, save_weights_only=True),
        # In the middle of an epoch.
        keras.callbacks.ModelCheckpoint(
            step, save_weights_only=True, save_freq=3
        ),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.BackupAndRestore(
            folder / "backup", delete_checkpoint=False
        ),
        keras.callbacks.EarlyStopping("loss", patience=9, verbose=1),
        own,
    ]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        model.fit(*data(), batch_size=6, epochs=2, callbacks=callbacks)
        # A list of Keras' own, and the methods by themselves.
        listed = keras.callbacks.CallbackList(
            [keras.callbacks.CSVLogger(folder / "more.csv")],
            add_history=True,
            model=model,
        )
        model.fit(*data(), batch_size=6, callbacks=listed)
        model.evaluate(*data())
        model.predict(data()[0])
    model.save(folder / "saved.keras")
    model.save(folder / "saved.keras")
    model.save_weights(str(folder / "saved.weights.h5"))
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    if index:
        assert shown.getvalue() == ""
        assert files == set()
    else:
        assert "Epoch 2/2" in shown.getvalue()
        assert "saving model to" in shown.getvalue()
        assert files == {
            *("1.keras", "2.keras", "saved.keras", "log.csv", "more.csv"),
            *("last.weights.h5", "latest.weights.h5", "saved.weights.h5"),
            *("step.weights.h5", "training_metadata.json"),
        }
        loaded = keras.models.load_model(folder / "saved.keras")
        assert weights(loaded) == weights(model)
    # A user's own callbacks run on every worker.
    assert [epoch for epoch, _ in own.epochs] == [0, 1]
    assert own.batches == [0, 1, 2, 3] * 2
    return own.epochs, weights(model)


@pytest.mark.parametrize("worker", [0, 1])
@on_workers()
def test_one_worker_that_stops_stops_all(worker):
    model, index = made()

    def stop(epoch, logs):
        if epoch == 1 and index == worker:
            model.stop_training = True

    stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    history = model.fit(*data(), epochs=4, callbacks=[stopping], verbose=0)
    assert len(history.history["loss"]) == 2


@pytest.mark.parametrize("worker", [0, 1])
@on_workers()
def test_the_chiefs_learning_rate_counts(worker):
    model, index = made()

    def change(epoch, logs):
        if index == worker:
            model.optimizer.learning_rate = 0.25 / (epoch + 1)

    changing = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    model.fit(*data(), epochs=2, callbacks=[changing], verbose=0)
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    assert rate == pytest.approx(0.05 if worker else 0.125)
    return weights(model)


@on_workers()
def test_random_states_are_shared_by_the_strategy():
    made()
    return random.random(), float(np.random.random())


@on_workers()
def test_without_seeds_each_row_is_seen_once():
    def target(truth, prediction):
        return truth

    model, index = made(loss="mae", metrics=[target])
    random.seed(index)
    np.random.seed(index)
    y = 2.0 ** np.arange(ROWS)[:, None]
    targets = model.fit(data()[0], y, epochs=3, **FIT).history["target"]
    np.testing.assert_allclose(targets, [(2.0**ROWS - 1) / ROWS] * 3, rtol=1e-6)
    return weights(model), targets, random.random(), np.random.random()


def trained(strategy):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = plain_model()
    model.fit(*data(), epochs=2, **FIT)
    return model.get_weights()


@on_workers()
def test_with_seeds_one_devices_numbers():
    found = trained(keras_dist.MultiWorkerMirroredStrategy())
    expected = trained(keras_dist.OneDeviceStrategy("cpu:0"))
    for own, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, plain, rtol=2e-5, atol=2e-6)


DISAGREEMENTS = {
    "rows": "rows of the data: 21 on worker 0, 20 on worker 1",
    "validation": "rows of the validation data: 4 on worker 0, 5 on worker 1",
    "callbacks": "save_freq of BackupAndRestore",
    "batch_size": "batch_size: 3 on worker 0, 4 on worker 1",
    "epochs": "epochs: 3 on worker 0, 4 on worker 1",
    "steps_per_epoch": "steps_per_epoch: 3 on worker 0, 4 on worker 1",
    "method": "worker 0 at `fit`, to compare arguments",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@on_workers()
def test_workers_that_disagree_are_told_before_anything_is_trained(what):
    model, is_last = made()
    model.build((None, 4))
    before = weights(model)
    x, y = data()
    options = {"epochs": 1, **FIT}
    fit = model.fit
    if what == "rows":
        x, y = x[: ROWS - is_last], y[: ROWS - is_last]
    elif what == "validation":
        options["validation_data"] = (x[: 4 + is_last], y[: 4 + is_last])
    elif what == "callbacks":
        backup = keras.callbacks.BackupAndRestore("/never", save_freq=7)
        options["callbacks"] = [backup] * is_last
    elif what == "method":
        fit = [model.fit, lambda x, y, **_: model.predict(x)][is_last]
    else:
        options[what] = 3 + is_last
    error = attempted(lambda: fit(x, y, **options))
    assert weights(model) == before
    assert not model.optimizer.built or not int(model.optimizer.iterations)
    assert DISAGREEMENTS[what] in error
    if what == "method":
        assert error.startswith("ReplicaDivergenceError: Workers are at diff")
        assert "worker 1 at `predict`, to compare arguments" in error
    else:
        told = "ReplicaDivergenceError: Workers are about to"
        assert error.startswith(told)
