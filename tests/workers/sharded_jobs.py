"""What workers run in `test_sharded.py`."""

import contextlib
import pathlib

import keras
import numpy as np

import keras_dist
from parity import cases
from parity import harness
from parity.harness import to_numpy
from sharded.helpers import adam
from sharded.helpers import fit
from sharded.helpers import network
from sharded.helpers import state_of

STATE = {"optimizer_state": "sharded"}


def in_cluster(options=STATE):
    """The strategy that parity cases are trained under from now on."""
    strategy = keras_dist.MultiWorkerMirroredStrategy(**options)
    harness.strategy = lambda num_replicas: strategy
    return strategy


def train_case(name):
    """The outcome of a case of the parity table."""
    count = in_cluster().num_replicas_in_sync
    (case,) = (case for case in cases.CASES if case.name == name)
    return harness.train(case, count, harness.strategy)


def compiled(strategy):
    with strategy.scope():
        model = network()
        model.compile(adam(), "mse")
    return model


class Interrupt(keras.callbacks.Callback):
    """Ends training in the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def save_all(folder, options=STATE):
    """Trains and saves in each way there is; what the state was then."""
    strategy = in_cluster(options)
    # Files that only the chief has: a folder of each worker's own.
    own = pathlib.Path(folder, str(strategy.plan.cluster.index))
    own.mkdir(parents=True, exist_ok=True)
    model = compiled(strategy)
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(own / "each" / "{epoch}.keras"), save_best_only=True
    )
    fit(model, callbacks=[checkpoint], validation_split=0.2)
    model.save(str(own / "model.keras"))
    model.save_weights(str(own / "some.weights.h5"))
    saved = state_of(model)
    backed = compiled(strategy)
    backup = keras.callbacks.BackupAndRestore(str(own / "backup"))
    with contextlib.suppress(KeyboardInterrupt):
        fit(backed, epochs=4, callbacks=[backup, Interrupt()])
    return {
        "saved": saved,
        "files": sorted(
            str(p.relative_to(own)) for p in own.rglob("*") if p.is_file()
        ),
    }


def load_all(folder, options=STATE):
    """Loads what `save_all` has saved, and goes on."""
    strategy = in_cluster(options)
    chiefs = pathlib.Path(folder, "0")
    own = pathlib.Path(folder, str(strategy.plan.cluster.index))
    with strategy.scope():
        model = keras.models.load_model(str(chiefs / "model.keras"))
    loaded = state_of(model)
    fit(model)
    weights = compiled(strategy)
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(str(chiefs / "some.weights.h5"))
    backed = compiled(strategy)
    backup = keras.callbacks.BackupAndRestore(str(own / "backup"))
    fit(backed, epochs=4, callbacks=[backup])
    return {
        "loaded": loaded,
        "gone_on": state_of(model),
        "weights": state_of(weights),
        "backed": state_of(backed),
    }


def bytes_kept(_):
    """Bytes of each slot on this worker's devices, and of the whole."""
    strategy = in_cluster()
    model = compiled(strategy)
    fit(model, epochs=1)
    executor = strategy.executor
    slots = [v for v in model.optimizer.variables if len(v.shape)]
    return [
        (
            list(executor.home(slot).bytes_kept().values()),
            tuple(slot.shape),
        )
        for slot in slots
    ], [to_numpy(slot).tolist() for slot in slots]


def collectives(optimizer_options):
    """PyTorch: the collectives of one step, by kind."""
    strategy = in_cluster()
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.Adam(**optimizer_options), "mse")
    x, y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")
    model.train_on_batch(x, y)
    workers = strategy.executor.workers
    found = {}
    for name in ("scatter_sum", "gather_flat", "start_sum", "_gather_bytes"):
        setattr(workers, name, _counted(getattr(workers, name), name, found))
    model.train_on_batch(x, y)
    return found


def _counted(method, name, found):
    def counting(*args):
        found.setdefault(name, []).append(args[-1].numel())
        return method(*args)

    return counting
