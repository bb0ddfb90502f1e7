"""Models with several optimizers go on as they were, after any stop."""

import functools
import os
import signal

import keras
import pytest

import keras_dist
from keras_dist.experimental import PreemptionCheckpointHandler
from keras_dist.experimental import TerminationConfig
from parity import gans
from parity.harness import assert_same
from sharded.helpers import SHARDS
from workers import clusters
from workers.clusters import on_workers
from workers.jobs import strategy_of

EPOCHS = 4
# What is sharded, where the model keeps its optimizers, how it came to the
# strategy, and whether its optimizers are built before.
CASES = [("mirrored", kind, "in_scope", True) for kind in gans.KINDS]
CASES += [("mirrored", "nested", "adopted", True)]
if SHARDS:
    CASES += [
        ("optimizer_state", "dict", "in_scope", True),
        ("optimizer_state", "scaled", "adopted", True),
        ("variables", "dict", "in_scope", True),
    ]
SHARDED = [case[:2] for case in CASES if case[0] != "mirrored"]
if keras.backend.backend() != "jax":  # where a step can't make variables
    CASES += [("mirrored", k, "in_scope", False) for k in ("dict", "parts")]
saves_parts = pytest.mark.only_on(
    "jax", "torch", reason="TensorFlow shards nothing, and refuses it."
)


def made(what, kind, is_built=True, way="in_scope"):
    """The strategy of all workers, and a model of it."""
    strategy = strategy_of(what)
    is_torch = keras.backend.backend() == "torch"
    gans.Two.goes_backward = is_torch and what == "variables"
    if way == "adopted":
        return strategy, strategy.distribute(gans.made(kind, is_built))
    with strategy.scope():
        return strategy, gans.made(kind, is_built)


def trained(kind):
    """A worker's state after a training that nothing has stopped."""
    _, model = made("mirrored", kind)
    gans.fit(model, EPOCHS)
    return gans.state_of(model)


@functools.cache
def whole(kind):
    first, second = clusters.run(
        trained, (kind,), workers=2, devices=1, timeout=300
    )
    assert_same(second, first, rtol=0, atol=0)
    return first


class Break(keras.callbacks.Callback):
    """Ends the first life."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


def restart(what, kind, way, is_built, folder):
    """The state after two lives; a backup is between them."""
    for callbacks in [Break()], []:
        _, model = made(what, kind, is_built, way)
        backup = keras.callbacks.BackupAndRestore(folder)
        try:
            gans.fit(model, EPOCHS, callbacks=[backup, *callbacks])
        except InterruptedError:
            continue
    return gans.state_of(model)


@pytest.mark.parametrize("case", CASES)
def test_a_backup_has_all_optimizers(case, tmp_path):
    for found in clusters.run(
        restart, (*case, tmp_path), workers=2, devices=1, timeout=300
    ):
        assert_same(found, whole(case[1]))


def preempted(what, kind, folder):
    """The state after two lives; worker 1 gets SIGTERM in the first."""
    ended = []
    for life in range(2):
        strategy, model = made(what, kind)
        handler = PreemptionCheckpointHandler(
            strategy.cluster_resolver,
            model,
            folder / str(strategy.plan.cluster.index),
            TerminationConfig(exit_fn=lambda: ended.append(True)),
        )
        for call in range(handler.total_run_calls, EPOCHS):
            if (life, strategy.plan.cluster.index, call) == (0, 1, 1):
                os.kill(os.getpid(), signal.SIGTERM)
            handler.run(gans.fit, model, 1)
            if ended and not life:
                break
        handler.stop_watching()
    assert len(ended) == 1
    return gans.state_of(model)


@pytest.mark.parametrize(
    ("what", "kind"), [("mirrored", "nested"), *SHARDED[:1]]
)
def test_all_optimizers_go_on_after_sigterm(what, kind, tmp_path):
    for found in clusters.run(
        preempted, (what, kind, tmp_path), workers=2, devices=1, timeout=300
    ):
        assert_same(found, whole(kind))


@saves_parts
@pytest.mark.parametrize(("what", "kind"), [*SHARDED, ("mirrored", "list")])
@on_workers()
def test_each_way_of_saving_has_all_optimizers(what, kind, tmp_path):
    _, model = made(what, kind)
    gans.fit(model)
    names = ("own.weights.h5", "whole.keras")
    model.save_weights(tmp_path / names[0])
    model.save(tmp_path / names[1])
    keras_dist.save_sharded(model, tmp_path / "parts")
    state = gans.state_of(model)
    _, again = made(what, kind, is_built=False)
    keras_dist.restore_sharded(again, tmp_path / "parts")
    assert_same(gans.state_of(again), state, rtol=0, atol=0)
    for name in names:
        plain = gans.made(kind)
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(tmp_path / name)
        assert_same(gans.state_of(plain), state, rtol=0, atol=0)
    return state


@pytest.mark.parametrize("what", ["mirrored", "variables"][: 1 + SHARDS])
@on_workers()
def test_an_optimizer_that_can_not_be_found(what, tmp_path):
    """A save would lose it."""
    _, model = made(what, "dict")
    model.more = {gans.adam()}
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(keras_dist.UnsupportedModelError) as error:
        gans.fit(model, 1, callbacks=[backup])
    assert "Optimizer 'adam" in str(error.value)
    assert "in a set or behind a property" in str(error.value)
