"""Callbacks that write run on the chief only: known ones, and marked ones."""

import os
import re

import keras
import numpy as np
import pytest

import keras_dist
from workers.clusters import on_workers
from workers.jobs import attempted

SHARDS = keras.backend.backend() != "tensorflow"
X = np.random.default_rng(0).normal(size=(12, 256)).astype("float32")


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
WANDB = "wandb.integration.keras.callbacks"
WandbMetricsLogger.__module__ = f"{WANDB}.metrics_logger"
WandbModelCheckpoint.__module__ = f"{WANDB}.model_checkpoint"


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
        one, run = keras.ops.ones(()), self.strategy.run
        actions = {
            "`predict` of model": lambda: self.model.predict(X, verbose=0),
            "`train_on_batch` of model": lambda: self.model.train_on_batch(
                X, X
            ),
            "`strategy.run`": lambda: run(lambda: keras.ops.ones(())),
            "An exchange of values, such as `strategy.reduce`,": lambda: (
                self.strategy.reduce("SUM", one, axis=None)
            ),
            "weights": lambda: len(self.model.get_weights()),
        }
        for name, action in actions.items():
            self.errors[name] = attempted(action)


@pytest.mark.parametrize("variables", ["mirrored", *["sharded"] * SHARDS])
@on_workers()
def test_one_worker_writes_and_all_train_alike(variables, tmp_path):
    index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
    own = tmp_path / str(index)
    own.mkdir()
    strategy = keras_dist.MultiWorkerMirroredStrategy(variables=variables)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        # Large enough to be sharded.
        stack = [keras.layers.Dense(256), keras.layers.Dense(256)]
        model = keras.Sequential([keras.Input((256,)), *stack])
        model.compile("adam", "mse")
    asking = keras_dist.on_chief(Asking(strategy))
    given = [
        keras.callbacks.CSVLogger(own / "log.csv"),
        keras.callbacks.ModelCheckpoint(own / "last.keras"),
        UsersLogger(own / "wandb.txt"),
        WandbModelCheckpoint(own / "wandb-{epoch}.keras", verbose=1),
        asking,
    ]
    written = {"log.csv", "last.keras", "wandb.txt"}
    written |= {"wandb-1.keras", "wandb-2.keras"}
    # Saving takes all workers if each has a part.
    if variables == "mirrored":
        given.append(keras_dist.on_chief(Writer(own / "users.txt")))
        written |= {"users.txt", "users.keras"}
    fit = {"batch_size": 6, "verbose": 0, "validation_data": (X, X)}
    assert model.fit(X, X, epochs=2, callbacks=given, **fit).epoch == [0, 1]
    files = {path.name for path in own.iterdir()}
    assert files == (set() if index else written)
    if index:
        assert asking.errors == {}
    else:
        # A writer of another package is told all.
        assert (own / "wandb.txt").read_text().splitlines() == [
            *("batch 0", "batch 1", "epoch 0 loss val_loss"),
            *("batch 0", "batch 1", "epoch 1 loss val_loss"),
        ]
        # What needs all workers raises at once. Variables can be read unless
        # each worker has a part.
        found = asking.errors.pop("weights")
        assert found == 4 or "needs all workers" in found
        assert (found == 4) == (variables == "mirrored")
        for named, error in asking.errors.items():
            assert re.match(
                rf"ReplicaDivergenceError: {named}( '\w+')? needs all workers, "
                "but only the chief runs the callback Asking, and would wait "
                "forever.",
                error,
            )
    # No hook is left behind, and the same callbacks work again.
    left = [name for each in given for name in vars(each) if name[:3] == "on_"]
    assert left == []
    assert model.fit(X, X, callbacks=given, **fit).epoch == [0]
    return [weight.tolist() for weight in model.get_weights()]


def test_a_mark_is_for_callbacks_that_only_write():
    with pytest.raises(TypeError, match="(?s)Received: <class .*CSVLogger"):
        keras_dist.on_chief(keras.callbacks.CSVLogger)
    stopping = keras.callbacks.EarlyStopping()
    with pytest.raises(ValueError, match="EarlyStopping changes the model"):
        keras_dist.on_chief(stopping)
    history = keras.callbacks.History()
    assert keras_dist.on_chief(history) is history
