"""What workers run in `test_sharded_checkpoints.py`."""

import contextlib
import os
import pathlib

import keras

import keras_dist
from keras_dist.experimental import PreemptionCheckpointHandler
from keras_dist.experimental import TerminationConfig
from keras_dist.fit.workers import checkpoint_folder
from keras_dist.plugin.backend import get_backend
from sharded.helpers import adam
from sharded.helpers import fit
from sharded.helpers import network
from sharded.helpers import state_of
from workers import jobs


def strategy_of(what):
    """A strategy of all workers; with large variables however small."""
    if what == "mirrored":
        return keras_dist.MultiWorkerMirroredStrategy()
    if keras.backend.backend() == "jax":
        from keras_dist_jax.sharding import shards as parts
    else:
        from keras_dist_torch import parts
    parts.LEAST_ELEMENTS = 1
    return keras_dist.MultiWorkerMirroredStrategy(**{what: "sharded"})


def compiled(strategy, rate=0.01):
    with strategy.scope():
        model = network()
        model.compile(adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


class Save(keras.callbacks.Callback):
    """Saves after the second epoch, on each worker."""

    def __init__(self, path, wait):
        super().__init__()
        self.path = path
        self.wait = wait

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            keras_dist.save_sharded(self.model, self.path, wait=self.wait)


def save(what, path, wait=True):
    """Saves within `fit`; the state at its end."""
    model = compiled(strategy_of(what))
    fit(model, epochs=4, callbacks=[Save(path, wait)])
    return state_of(model)


def restore(what, path):
    """The restored state, and that at the end of the same `fit`."""
    model = compiled(strategy_of(what))
    keras_dist.restore_sharded(model, path)
    restored = state_of(model)
    fit(model, initial_epoch=2, epochs=4)
    return restored, state_of(model)


def save_again(what, path):
    """Saves twice to one path; the state then."""
    model = compiled(strategy_of(what))
    keras_dist.save_sharded(model, path)
    fit(model)
    keras_dist.save_sharded(model, path)
    return state_of(model)


def other_paths(what, path):
    """Errors of workers that share no folder; their models' states."""
    checkpoint_folder.PATIENCE = 0.2
    strategy = strategy_of(what)
    index = strategy.plan.cluster.index
    own = os.path.join(path, str(index))
    pathlib.Path(own).mkdir()
    model = compiled(strategy)
    before = state_of(model)
    saving = jobs.attempted(keras_dist.save_sharded, model, own)
    shared = os.path.join(path, "shared")
    keras_dist.save_sharded(model, shared)
    fit(model)
    trained = state_of(model)
    absent = shared if index == 0 else own
    restoring = jobs.attempted(keras_dist.restore_sharded, model, absent)
    nowhere = jobs.attempted(keras_dist.restore_sharded, model, own)
    after = state_of(model)
    same = all((after[key] == trained[key]).all() for key in after)
    assert before.keys() == after.keys()
    return saving, restoring, nowhere, same, os.listdir(own)


def unwritable(what, path):
    """An error of one worker's, on all."""
    model = compiled(strategy_of(what))
    return jobs.attempted(keras_dist.save_sharded, model, path)


def fail(what, path, wait):
    """Errors of one worker's that can't write, on all; the state before."""
    strategy = strategy_of(what)
    model = compiled(strategy)
    keras_dist.save_sharded(model, path)
    before = state_of(model)
    fit(model)
    backend = type(get_backend())
    original = backend.save_shards

    def failing(*args):
        writing = original(*args)
        if strategy.plan.cluster.index == 1:
            writing.write = lambda: os.mkdir(path)
        return writing

    backend.save_shards = failing
    try:
        saving = jobs.attempted(keras_dist.save_sharded, model, path, wait)
    finally:
        backend.save_shards = original
    fit(model)
    error = saving if wait else jobs.attempted(saving.result)
    # All workers go on.
    keras_dist.save_sharded(model, f"{path}-2")
    return error, before


class Interrupt(keras.callbacks.Callback):
    """Ends training at one step of one epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.place = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            raise KeyboardInterrupt


def back_up(what, path, frequency, epoch, batch):
    """Trains until it is interrupted; the files that are there then."""
    model = compiled(strategy_of(what))
    backup = keras.callbacks.BackupAndRestore(path, save_freq=frequency)
    with contextlib.suppress(KeyboardInterrupt):
        interrupt = Interrupt(epoch, batch)
        fit(model, epochs=4, callbacks=[backup, interrupt])
    return sorted(os.listdir(path))


def go_on(what, path, frequency):
    """The state at the end of the training that was interrupted."""
    model = compiled(strategy_of(what))
    backup = keras.callbacks.BackupAndRestore(path, save_freq=frequency)
    fit(model, epochs=4, callbacks=[backup])
    return state_of(model)


def preempt(what, path):
    """A worker's state when it has to end, and when it goes on."""
    config = TerminationConfig(lambda: True, exit_fn=lambda: None)
    states = []
    for calls in (0, 1):
        model = compiled(strategy_of(what))
        handler = PreemptionCheckpointHandler(None, model, path, config)
        assert handler.total_run_calls == calls
        states.append(state_of(model))
        handler.run(fit, model)
        states.append(state_of(model))
    return states[1:3]
