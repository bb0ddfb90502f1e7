"""Callbacks see one model and global logs: what they write is plain Keras'."""

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


def _model(num_replicas, learning_rate=0.05):
    keras.utils.set_random_seed(1)
    with scope(num_replicas):
        model = set_initial_weights(models.mlp())
        model.compile(
            keras.optimizers.Adam(learning_rate),
            "mse",
            metrics=["mae"],
            jit_compile=JIT,
        )
    return model


def _fit(model, callback, epochs=3):
    return model.fit(
        **models.table(21),
        batch_size=7,
        epochs=epochs,
        shuffle=False,
        validation_data=HELD_OUT,
        verbose=0,
        callbacks=[callback],
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
        model = _model(num_replicas)
        checkpoint = callbacks.ModelCheckpoint(
            path, save_weights_only=True, save_freq=2
        )
        _fit(model, checkpoint, epochs=1)
        loaded = _model(None)
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(path)
        return state_of(loaded)

    _same(outcome)


def test_early_stopping_restores_the_best():
    def outcome(num_replicas):
        model = _model(num_replicas, learning_rate=0.8)
        stopping = callbacks.EarlyStopping(
            patience=1, restore_best_weights=True, start_from_epoch=0
        )
        history = _fit(model, stopping, epochs=8)
        assert len(history["loss"]) < 8
        return flat("history", history) | {
            f"weights/{index}": weight
            for index, weight in enumerate(model.get_weights())
        }

    _same(outcome)


def _shrinking(model):
    """What a callback assigns is what the next step starts from."""

    def shrink(batch, logs):
        # Through the callback: there Keras gives JAX models their values.
        model = shrinking.model
        model.set_weights([0.5 * w for w in model.get_weights()])
        model.optimizer.learning_rate = 0.01 / (batch + 1)

    shrinking = callbacks.LambdaCallback(on_train_batch_end=shrink)
    return shrinking


def _stopping(model):
    def stop(batch, logs):
        model.stop_training = batch == 1

    return callbacks.LambdaCallback(on_train_batch_end=stop)


CHANGING = {
    "plateau": lambda model: callbacks.ReduceLROnPlateau(
        patience=1, factor=0.3, min_delta=0.5
    ),
    "scheduler": lambda model: callbacks.LearningRateScheduler(
        lambda _, rate: rate * 0.5
    ),
    "shrinking": _shrinking,
    "stopping": _stopping,
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_callback_that_changes_the_training(name):
    def outcome(num_replicas):
        model = _model(num_replicas)
        history = _fit(model, CHANGING[name](model))
        rate = float(to_numpy(model.optimizer.learning_rate))
        assert rate < 0.02 or len(history["loss"]) < 3
        return flat("history", history) | state_of(model)

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
        backup = {"backup_dir": tmp_path / str(num_replicas)}
        data = models.table(21)
        options = {"batch_size": 7, "epochs": 4, "shuffle": False, "verbose": 0}
        with pytest.raises(KeyboardInterrupt):
            _model(num_replicas).fit(
                **data,
                **options,
                callbacks=[callbacks.BackupAndRestore(**backup), _Interrupt()],
            )
        model = _model(num_replicas, learning_rate=0.5)
        history = model.fit(
            **data, **options, callbacks=[callbacks.BackupAndRestore(**backup)]
        ).history
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


def test_predict_and_evaluate_in_a_callback():
    def outcome(num_replicas):
        model, seen = _model(num_replicas), []

        def look(epoch, logs):
            seen.append(model.predict(HELD_OUT[0], 4, verbose=0))
            seen.append(model.evaluate(*HELD_OUT, 4, verbose=0))

        looking = callbacks.LambdaCallback(on_epoch_end=look)
        history = _fit(model, looking)
        return flat("history", history) | flat("seen", seen) | state_of(model)

    _same(outcome)


def test_swap_ema_weights():
    def outcome(num_replicas):
        model = _model(num_replicas)
        model.compile(
            keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7),
            "mse",
            jit_compile=JIT,
        )
        swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
        return flat("history", _fit(model, swap)) | state_of(model)

    _same(outcome)


def test_terminate_on_nan():
    nan = models.table(21)
    nan["y"][8] = np.nan

    def outcome(num_replicas):
        history = _model(num_replicas).fit(
            **nan,
            batch_size=7,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[callbacks.TerminateOnNaN()],
        )
        assert len(history.history["loss"]) == 1
        return flat("history", history.history)

    _same(outcome)
