"""A script that is killed and started again; see `test_resuming.py`.

Each life of the workers goes on with the case that the last one died in.
"""

import json
import os
import pathlib
import random
import signal
import sys

import keras
import numpy as np

import keras_dist

ROWS, BATCH, EPOCHS = 21, 6, 3
# Who is killed, and how: in a step, or while saving.
CASES = {
    "epoch": ("epoch", 1, "step"),
    "saving": (3, 0, "saving"),
}


class Fragile(keras.layers.Dense):
    """A layer that kills the process that saves it, once it is told to."""

    is_armed = False

    def save_own_variables(self, store):
        if Fragile.is_armed:
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_own_variables(store)


class Killer(keras.callbacks.Callback):
    """Kills one worker in the second epoch, or arms `Fragile`."""

    def __init__(self, is_victim, how):
        super().__init__()
        self.is_victim, self.how = is_victim, how
        self.batches = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((self.epoch, batch))
        if self.is_victim and (self.epoch, batch) == (1, 2):
            if self.how == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            Fragile.is_armed = True


class Batches(keras.utils.PyDataset):
    """Batches that Keras shuffles, with noise of Python's and NumPy's."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    @property
    def num_batches(self):
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        noise = random.random() + np.random.random()
        return self.x[rows] + np.float32(noise), self.y[rows]


def model_of(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                # A gradient of 0, as a bias has here, is rounding alone.
                Fragile(8, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def train(strategy, name, folder, broken=False):
    frequency, victim, how = CASES[name]
    index = strategy.plan.cluster.index
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    data = {"x": x, "y": y, "batch_size": BATCH}
    if how == "step":
        data = {"x": Batches(x, y)}
    killer = Killer(broken and index == victim, how)
    backup = keras.callbacks.BackupAndRestore(
        # Workers may be on hosts that share no files.
        folder / f"{name}-{index}",
        save_freq=frequency,
    )
    plateau = keras.callbacks.LearningRateScheduler(lambda _, rate: rate * 0.9)
    model = model_of(strategy)
    history = model.fit(
        **data,
        epochs=EPOCHS,
        callbacks=[backup, plateau, killer],
        validation_data=(x[:7], y[:7]),
        verbose=0,
    ).history
    # The next training begins at the beginning.
    more = model.fit(**data, epochs=1, verbose=0).history
    return {
        "history": history,
        "more": more,
        "batches": killer.batches,
        "weights": [weight.tolist() for weight in model.get_weights()],
        "left": (folder / f"{name}-{index}").exists(),
    }


def main():
    folder = pathlib.Path(sys.argv[1])
    restarts = int(os.environ["KERAS_DIST_RESTARTS"])
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index
    names = list(CASES)
    for position, name in enumerate(names):
        if position < restarts - 1:
            continue  # it was resumed in an earlier life
        found = train(strategy, name, folder, broken=position == restarts)
        (folder / f"{name}-{index}.json").write_text(json.dumps(found))
    for name in names:
        found = train(strategy, name, folder / "unbroken")
        (folder / f"{name}-{index}-unbroken.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
