"""What workers run in the tests of callbacks; see `test_callbacks.py`."""

import contextlib
import io
import os
import pathlib
import random

import keras
import numpy as np

import keras_dist
from workers.jobs import attempted

ROWS = 21


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def compiled(layers, **options):
    model = keras.Sequential([keras.Input((4,)), *layers])
    options = {"loss": "mse", "metrics": ["mae"], **options}
    model.compile(keras.optimizers.Adam(0.05), **options)
    return model


def plain_model(**options):
    return compiled([keras.layers.Dense(3), keras.layers.Dense(1)], **options)


def weights(model):
    return [weight.tolist() for weight in model.get_weights()]


def iterations(model):
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def learning_rate(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


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


class Program:
    """One worker's program.

    Args:
        strategy: The strategy.
        folder: Where this worker may write, and no other one.
    """

    def __init__(self, strategy, folder):
        self.strategy = strategy
        self.index = strategy.plan.cluster.index
        self.folder = folder

    def model(self, **options):
        with self.strategy.scope():
            return plain_model(**options)

    def files(self):
        paths = sorted(self.folder.rglob("*"))
        return [p.name for p in paths if p.is_file()]

    def shown_and_written(self):
        keras.utils.set_random_seed(1)
        own = OwnCallback()
        callbacks = [
            OwnCheckpoint(self.folder / "{epoch}.keras", verbose=1),
            keras.callbacks.ModelCheckpoint(
                self.folder / "last.weights.h5", save_weights_only=True
            ),
            # In the middle of an epoch, on one worker only.
            keras.callbacks.ModelCheckpoint(
                self.folder / "step.weights.h5",
                save_weights_only=True,
                save_freq=3,
            ),
            keras.callbacks.CSVLogger(self.folder / "log.csv"),
            keras.callbacks.BackupAndRestore(
                self.folder / "backup", delete_checkpoint=False
            ),
            keras.callbacks.EarlyStopping("loss", patience=9, verbose=1),
            own,
        ]
        model = self.model()
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            model.fit(*data(), batch_size=6, epochs=2, callbacks=callbacks)
            # A list of Keras' own, and the methods by themselves.
            listed = keras.callbacks.CallbackList(
                [keras.callbacks.CSVLogger(self.folder / "more.csv")],
                add_history=True,
                model=model,
            )
            model.fit(*data(), batch_size=6, callbacks=listed)
            model.evaluate(*data())
            model.predict(data()[0])
        model.save(self.folder / "saved.keras")
        model.save(self.folder / "saved.keras")
        model.save_weights(str(self.folder / "saved.weights.h5"))
        found = {
            "shown": shown.getvalue(),
            "files": self.files(),
            "own": own.epochs,
            "batches": own.batches,
            "weights": weights(model),
        }
        if self.index == 0:
            loaded = keras.models.load_model(self.folder / "saved.keras")
            found["loaded"] = weights(loaded)
        return found

    def stopped_by_one(self, worker):
        def stop(epoch, logs):
            if epoch == 1 and self.index == worker:
                stopping.model.stop_training = True

        stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
        model = self.model()
        history = model.fit(*data(), epochs=4, callbacks=[stopping], verbose=0)
        return len(history.history["loss"])

    def learning_rate_of(self, worker):
        def change(epoch, logs):
            if self.index == worker:
                changing.model.optimizer.learning_rate = 0.25 / (epoch + 1)

        changing = keras.callbacks.LambdaCallback(on_epoch_begin=change)
        model = self.model()
        model.fit(*data(), epochs=2, callbacks=[changing], verbose=0)
        return learning_rate(model), weights(model)

    def without_seeds(self):
        random.seed(self.index)
        np.random.seed(self.index)
        x, _ = data()
        y = 2.0 ** np.arange(ROWS)[:, None]

        def target(truth, prediction):
            return truth

        model = self.model(loss="mae", metrics=[target])
        history = model.fit(x, y, batch_size=4, epochs=3, verbose=0)
        return {
            "weights": weights(model),
            "targets": history.history["target"],
            "next": (random.random(), float(np.random.random())),
        }

    def with_seeds(self):
        keras.utils.set_random_seed(5)
        model = self.model()
        model.fit(*data(), batch_size=4, epochs=2, verbose=0)
        return weights(model)

    def disagreement(self, what):
        model = self.model()
        model.build((None, 4))
        before = weights(model)
        x, y = data()
        options = {"batch_size": 4, "verbose": 0, "epochs": 1}
        is_last = self.index == 1
        if what == "rows":
            x, y = x[: ROWS - is_last], y[: ROWS - is_last]
        elif what == "validation":
            options["validation_data"] = (x[: 4 + is_last], y[: 4 + is_last])
        elif what == "callbacks":
            folder = self.folder / "never"
            backup = keras.callbacks.BackupAndRestore(folder, save_freq=7)
            options["callbacks"] = [backup] * is_last
        elif what == "method" and is_last:
            return attempted(model.predict, x)
        elif what != "method":
            options[what] = 3 + is_last
        error = attempted(lambda: model.fit(x, y, **options))
        assert weights(model) == before
        assert not model.optimizer.built or not iterations(model)
        return error


DISAGREEMENTS = ["rows", "method", "validation", "callbacks", "batch_size"]
DISAGREEMENTS += ["epochs", "steps_per_epoch"]


def everything(folder):
    index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
    own = pathlib.Path(folder, str(index))
    own.mkdir()
    # Different, but the strategy makes them the same.
    random.seed(index)
    np.random.seed(index)
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    program = Program(strategy, own)
    drawn = random.random(), float(np.random.random())
    found = {
        name: attempted(getattr(program, name))
        for name in ("shown_and_written", "without_seeds", "with_seeds")
    }
    for worker in (0, 1):
        for name in ("stopped_by_one", "learning_rate_of"):
            method = getattr(program, name)
            found[f"{name} {worker}"] = attempted(method, worker)
    for what in DISAGREEMENTS:
        found[what] = attempted(program.disagreement, what)
    # Still in step after all that.
    found["at the end"] = attempted(program.with_seeds)
    return {**found, "drawn": drawn}
