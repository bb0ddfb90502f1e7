"""Callbacks see one model and global logs, and write what plain Keras' do."""

import csv
import importlib.util

import keras
import numpy as np
import pytest
from keras import callbacks

from parity import models
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of
from parity.harness import to_numpy

HELD_OUT = tuple(models.table(10).values())


def _model(num_replicas, optimizer=None):
    keras.utils.set_random_seed(1)
    with scope(num_replicas):
        model = set_initial_weights(models.mlp())
        model.compile(
            optimizer or keras.optimizers.Adam(0.05),
            "mse",
            metrics=["mae"],
            jit_compile=JIT,
        )
    return model


def _fit(model, *given, data=None, epochs=3, **options):
    return model.fit(
        **(data or models.table(21)),
        batch_size=7,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*given],
        **{"validation_data": HELD_OUT, **options},
    ).history


def _same(outcome, num_replicas=3):
    assert_same(outcome(num_replicas), outcome(None), rtol=1e-4)


@pytest.mark.parametrize("whole_model", [False, True])
def test_model_checkpoint(whole_model, tmp_path):
    """A file for each epoch that was best; plain Keras reads it."""
    suffix = ".keras" if whole_model else ".weights.h5"

    def outcome(num_replicas):
        folder = tmp_path / str(num_replicas)
        folder.mkdir()
        checkpoint = callbacks.ModelCheckpoint(
            folder / ("{epoch}" + suffix),
            monitor="val_loss",
            save_best_only=True,
            save_weights_only=not whole_model,
        )
        history = _fit(_model(num_replicas), checkpoint)
        kept = {}
        for path in sorted(folder.iterdir()):
            if whole_model:
                loaded = keras.models.load_model(path)
            else:
                loaded = _model(None)
                loaded.build()
                loaded.optimizer.build(loaded.trainable_variables)
                loaded.load_weights(path)
            kept[path.name] = list(state_of(loaded).values())
        assert kept
        return flat("history", history) | flat("kept", kept)

    _same(outcome)


def test_checkpoint_every_few_batches(tmp_path):
    def outcome(num_replicas):
        path = tmp_path / f"{num_replicas}.weights.h5"
        checkpoint = callbacks.ModelCheckpoint(
            path, save_weights_only=True, save_freq=2
        )
        _fit(_model(num_replicas), checkpoint, epochs=1)
        loaded = _model(None)
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(path)
        return state_of(loaded)

    _same(outcome)


def _shrinking():
    """What a callback assigns is what the next step starts from."""

    def shrink(batch, logs):
        # Through the callback: there Keras gives JAX models their values.
        model = shrinking.model
        model.set_weights([0.5 * w for w in model.get_weights()])
        model.optimizer.learning_rate = 0.01 / (batch + 1)

    shrinking = callbacks.LambdaCallback(on_train_batch_end=shrink)
    return shrinking


class _Stopping(callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1


class _Looking(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        predicted = self.model.predict(HELD_OUT[0], 4, verbose=0)
        logs["predicted"] = float(predicted.sum())
        logs["evaluated"] = self.model.evaluate(*HELD_OUT, 4, verbose=0)[0]


def _with_nan():
    data = models.table(21)
    data["y"][8] = np.nan
    return {"data": data, "validation_data": None}


def _fast():
    return keras.optimizers.Adam(0.8)


def _averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)


# The callback, the optimizer, options of `fit`, and how many epochs it takes.
CHANGING = {
    "plateau": (
        lambda: callbacks.ReduceLROnPlateau(
            patience=1, factor=0.3, min_delta=0.5
        ),
        *(None, {}, 3),
    ),
    "scheduler": (
        lambda: callbacks.LearningRateScheduler(lambda _, rate: rate * 0.5),
        *(None, {}, 3),
    ),
    "shrinking": (_shrinking, None, {}, 3),
    "stopping": (_Stopping, None, {}, 1),
    "early_stopping": (
        lambda: callbacks.EarlyStopping(
            patience=1, restore_best_weights=True, start_from_epoch=0
        ),
        *(_fast, {"epochs": 8}, None),
    ),
    "looking": (_Looking, None, {}, 3),
    "swapping": (
        lambda: callbacks.SwapEMAWeights(swap_on_epoch=True),
        *(_averaging, {}, 3),
    ),
    "nan": (callbacks.TerminateOnNaN, None, _with_nan(), 1),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_callback_that_changes_the_training(name):
    make, optimizer, options, epochs = CHANGING[name]

    def outcome(num_replicas):
        model = _model(num_replicas, optimizer and optimizer())
        history = _fit(model, make(), **options)
        assert epochs in (None, len(history["loss"]))
        assert len(history["loss"]) < 8
        rate = float(to_numpy(model.optimizer.learning_rate))
        assert rate < 0.02 or name not in ("plateau", "scheduler", "shrinking")
        state = {} if name == "nan" else state_of(model)
        return flat("history", history) | state

    _same(outcome)


def test_csv_logger(tmp_path):
    def outcome(num_replicas):
        path = tmp_path / f"{num_replicas}.csv"
        _fit(_model(num_replicas), callbacks.CSVLogger(path))
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["epoch"] for row in rows] == ["0", "1", "2"]
        return {
            f"{index}/{name}": np.float64(value)
            for index, row in enumerate(rows)
            for name, value in row.items()
        }

    _same(outcome)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("tensorflow", "tensorboard"))),
    reason="Keras' TensorBoard callback needs tensorflow and tensorboard.",
)
def test_tensorboard(tmp_path):
    import tensorflow as tf

    def outcome(num_replicas):
        folder = tmp_path / str(num_replicas)
        board = callbacks.TensorBoard(
            folder, write_graph=False, update_freq=1, histogram_freq=1
        )
        _fit(_model(num_replicas), board, epochs=2)
        board._val_writer.close()
        values = {}
        for path in sorted(folder.rglob("events*")):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    tensor = tf.make_ndarray(value.tensor)
                    if "histogram" in value.tag or not tensor.size:
                        continue
                    if "steps_per_second" in value.tag:
                        continue
                    name = f"{path.parent.name}/{value.tag}/{event.step}"
                    values[name] = np.asarray(tensor, np.float64)
        assert values
        return values

    _same(outcome)


class _Interrupt(callbacks.Callback):
    """Stops the first training in its third epoch, as a killed job is."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.smoke
def test_backup_and_restore(tmp_path):
    def outcome(num_replicas):
        def backup():
            return callbacks.BackupAndRestore(tmp_path / str(num_replicas))

        options = {"epochs": 4, "validation_data": None}
        with pytest.raises(KeyboardInterrupt):
            _fit(_model(num_replicas), backup(), _Interrupt(), **options)
        model = _model(num_replicas, keras.optimizers.Adam(0.5))
        history = _fit(model, backup(), **options)
        assert len(history["loss"]) == 2
        return flat("history", history) | state_of(model)

    _same(outcome)


@pytest.mark.parametrize(
    "num_replicas", [2, pytest.param(4, marks=pytest.mark.smoke)]
)
def test_weights_at_each_batch(num_replicas):
    """`get_weights` and the optimizer, read while `fit` is running."""

    def outcome(count):
        seen = []

        # Through the callback: there Keras gives JAX models their values.
        def read(batch, logs):
            model = reader.model
            seen.append(
                [
                    *model.get_weights(),
                    to_numpy(model.optimizer.iterations),
                    to_numpy(model.optimizer.learning_rate),
                    *logs.values(),
                ]
            )

        reader = callbacks.LambdaCallback(
            on_train_batch_end=read,
            on_epoch_end=lambda epoch, logs: seen.append(
                [*reader.model.get_weights(), *logs.values()]
            ),
        )
        _fit(_model(count), reader, epochs=2)
        return flat("seen", seen)

    _same(outcome, num_replicas)
