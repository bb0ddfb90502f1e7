"""What workers run in the tests of callbacks that only the chief runs."""

import os
import pathlib

import keras
import numpy as np

import keras_dist
from workers.jobs import attempted

X = np.random.default_rng(0).normal(size=(12, 256)).astype("float32")
Y = X


class _Notes(keras.callbacks.Callback):
    """A callback that can write lines to a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def note(self, *line):
        with self.path.open("a") as file:
            print(*line, file=file)


class WandbMetricsLogger(_Notes):
    """Writes what it is told, as that of Weights & Biases."""

    def on_train_batch_end(self, batch, logs=None):
        self.note("batch", batch)

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch", epoch, *sorted(logs))


class WandbModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves, and needs the file that it has saved."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        path = self._get_file_path(epoch, None, logs)
        assert os.path.isfile(path), path


# The packages' own modules, by which these classes are known.
WandbMetricsLogger.__module__ = (
    "wandb.integration.keras.callbacks.metrics_logger"
)
WandbModelCheckpoint.__module__ = (
    "wandb.integration.keras.callbacks.model_checkpoint"
)


class UsersLogger(WandbMetricsLogger):
    """A user's subclass."""


class Writer(_Notes):
    """A callback that keras_dist doesn't know."""

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch", epoch)
        self.model.save(self.path.with_suffix(".keras"))


class Asking(_Notes):
    """Does what needs all workers."""

    def __init__(self, strategy):
        super().__init__(None)
        self.strategy = strategy
        self.errors = {}

    def on_epoch_end(self, epoch, logs=None):
        actions = {
            "predict": lambda: self.model.predict(X, verbose=0),
            "train_on_batch": lambda: self.model.train_on_batch(X, Y),
            "run": lambda: self.strategy.run(lambda: keras.ops.ones(())),
            "reduce": lambda: self.strategy.reduce(
                "SUM", keras.ops.ones(()), axis=None
            ),
            "weights": lambda: len(self.model.get_weights()),
        }
        for name, action in actions.items():
            self.errors[name] = attempted(action)


def everything(folder, variables):
    """One worker's program; each worker has a folder of its own."""
    index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
    own = pathlib.Path(folder, str(index))
    own.mkdir()
    strategy = keras_dist.MultiWorkerMirroredStrategy(variables=variables)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((256,)),
                # Large enough to be sharded.
                keras.layers.Dense(256),
                keras.layers.Dense(256),
            ]
        )
        model.compile("adam", "mse")
    asking = keras_dist.on_chief(Asking(strategy))
    given = [
        keras.callbacks.CSVLogger(own / "log.csv"),
        keras.callbacks.ModelCheckpoint(own / "last.keras"),
        UsersLogger(own / "wandb.txt"),
        WandbModelCheckpoint(own / "wandb-{epoch}.keras", verbose=1),
        asking,
    ]
    # Saving takes all workers if each has a part.
    if variables == "mirrored":
        given.append(keras_dist.on_chief(Writer(own / "users.txt")))
    fit = {"batch_size": 6, "verbose": 0, "validation_data": (X, Y)}
    first = attempted(
        lambda: model.fit(X, Y, epochs=2, callbacks=given, **fit).epoch
    )
    files = sorted(path.name for path in own.iterdir())
    texts = {path.name: path.read_text() for path in own.glob("*.txt")}
    # No hook is left behind, and the same callbacks work again.
    left = [name for each in given for name in vars(each) if name[:3] == "on_"]
    again = attempted(lambda: model.fit(X, Y, callbacks=given, **fit).epoch)
    return {
        "epochs": [first, again],
        "files": files,
        "texts": texts,
        "errors": asking.errors,
        "left": left,
        "weights": [weight.tolist() for weight in model.get_weights()],
    }
