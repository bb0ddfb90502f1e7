"""What workers run in `test_gans.py`."""

import os
import signal

import keras

import keras_dist
from keras_dist.experimental import PreemptionCheckpointHandler
from keras_dist.experimental import TerminationConfig
from parity import gans
from workers.sharded_checkpoints_jobs import strategy_of

EPOCHS = 4


def made(what, kind, is_built=True, way="in_scope"):
    """The strategy of all workers, and a model of it."""
    strategy = strategy_of(what)
    is_torch = keras.backend.backend() == "torch"
    gans.Two.goes_backward = is_torch and what == "variables"
    if way == "adopted":
        return strategy, strategy.distribute(gans.made(kind, is_built))
    with strategy.scope():
        return strategy, gans.made(kind, is_built)


class Break(keras.callbacks.Callback):
    """Ends the first life."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


def whole(what, kind):
    _, model = made(what, kind)
    gans.fit(model, EPOCHS)
    return gans.state_of(model)


def restart(what, kind, folder, is_built=True, way="in_scope"):
    """The state after two lives; a backup is between them."""
    for callbacks in [Break()], []:
        _, model = made(what, kind, is_built, way)
        backup = keras.callbacks.BackupAndRestore(folder)
        try:
            gans.fit(model, EPOCHS, callbacks=[backup, *callbacks])
        except InterruptedError:
            continue
    return gans.state_of(model)


def preempted(what, kind, folder, is_built=True):
    """The state after two lives; worker 1 gets SIGTERM in the first."""
    ended = []
    for life in range(2):
        strategy, model = made(what, kind, is_built)
        handler = PreemptionCheckpointHandler(
            strategy.cluster_resolver,
            model,
            os.path.join(folder, str(strategy.plan.cluster.index)),
            TerminationConfig(exit_fn=lambda: ended.append(True)),
        )
        for call in range(handler.total_run_calls, EPOCHS):
            if (life, strategy.plan.cluster.index, call) == (0, 1, 1):
                os.kill(os.getpid(), signal.SIGTERM)
            handler.run(gans.fit, model, 1)
            if ended and not life:
                break
        handler.stop_watching()
    return gans.state_of(model), len(ended)


def saved(what, kind, folder):
    """The state that is saved in each way, and what parts restore of it."""
    _, model = made(what, kind)
    gans.fit(model)
    model.save_weights(os.path.join(folder, "own.weights.h5"))
    model.save(os.path.join(folder, "whole.keras"))
    keras_dist.save_sharded(model, os.path.join(folder, "parts"))
    _, again = made(what, kind, is_built=False)
    keras_dist.restore_sharded(again, os.path.join(folder, "parts"))
    return gans.state_of(model), gans.state_of(again)


def kept_apart(what, folder):
    """The error of a save that would lose an optimizer, on each worker."""
    _, model = made(what, "dict")
    model.more = {gans.adam()}
    backup = keras.callbacks.BackupAndRestore(folder)
    try:
        gans.fit(model, 1, callbacks=[backup])
    except keras_dist.UnsupportedModelError as error:
        return str(error)
    return ""
