"""What some workers save, in parts, other numbers of workers restore."""

import contextlib
import functools
import json
import os
import pathlib
import tempfile

import keras
import pytest

import keras_dist
from keras_dist.experimental import PreemptionCheckpointHandler
from keras_dist.experimental import TerminationConfig
from keras_dist.fit.workers import checkpoint_folder
from keras_dist.plugin.backend import get_backend
from parity.harness import assert_same
from parity.harness import sharded_variables
from sharded import helpers
from sharded.helpers import SHARDS_ON_DEVICES
from sharded.helpers import adam
from sharded.helpers import fit
from sharded.helpers import mirrored
from sharded.helpers import network
from sharded.helpers import sharded
from sharded.helpers import state_of
from workers import clusters
from workers.clusters import on_workers
from workers.jobs import attempted
from workers.jobs import strategy_of

pytestmark = [
    pytest.mark.only_on(
        "jax", "torch", reason="TensorFlow shards nothing, and refuses it."
    ),
    pytest.mark.usefixtures("all_are_large"),
]
# Workers that save, and that restore: what they shard, their number, and each
# one's devices.
TWO, THREE = ("variables", 2, 1), ("variables", 3, 1)
MIRRORED, STATE = ("mirrored", 2, 1), ("optimizer_state", 2, 1)
WAYS = [
    *((TWO, TWO), (TWO, THREE), (THREE, TWO), (TWO, MIRRORED), (STATE, TWO)),
    (MIRRORED, ("optimizer_state", 3, 1)),
]
if keras.backend.backend() == "jax":
    WAYS += [(("variables", 2, 2), TWO), (TWO, ("variables", 2, 2))]


def launched(job, kind, path, *args):
    what, workers, devices = kind
    return clusters.run(
        job,
        (what, str(path), *args),
        workers=workers,
        devices=devices,
        timeout=300,
    )


def compiled(what):
    strategy = strategy_of(what)
    with strategy.scope():
        model = network()
        model.compile(adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def index_of_worker():
    return int(os.environ["KERAS_DIST_WORKER_INDEX"])


def restored_plainly(path):
    plain = helpers.compiled(None)
    keras_dist.restore_sharded(plain, path)
    return state_of(plain)


@functools.cache
def whole():
    """The state at the end of a training that nothing has interrupted."""
    model = helpers.compiled(None)
    fit(model, epochs=4)
    return state_of(model)


def save(what, path, wait=True):
    """Saves in `fit`, after the second epoch; the state at its end."""

    def save_shards(epoch, logs):
        if epoch == 1:
            keras_dist.save_sharded(model, path, wait=wait)

    model = compiled(what)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=save_shards)
    fit(model, epochs=4, callbacks=[callback])
    return state_of(model)


def restore(what, path):
    """The restored state, and that at the end of the same `fit`."""
    model = compiled(what)
    keras_dist.restore_sharded(model, path)
    restored = state_of(model)
    fit(model, initial_epoch=2, epochs=4)
    return restored, state_of(model)


@functools.cache
def saved(kind):
    """The path of a checkpoint, and the state at the end of training."""
    path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    return path, launched(save, kind, path)[0]


@pytest.mark.parametrize(("saving", "restoring"), WAYS)
def test_another_number_of_workers_goes_on(saving, restoring):
    path, expected = saved(saving)
    plain = restored_plainly(path)
    for restored, end in launched(restore, restoring, path):
        assert_same(restored, plain, rtol=0, atol=0)
        assert_same(end, expected)


@pytest.mark.parametrize("kind", [TWO, STATE])
def test_one_process_goes_on(kind):
    path, expected = saved(kind)
    ways = [(None, None)]
    if SHARDS_ON_DEVICES:
        ways += [(3, sharded), (3, sharded_variables)]
    for place in ways:
        model = helpers.compiled(*place)
        keras_dist.restore_sharded(model, path)
        fit(model, initial_epoch=2, epochs=4)
        assert_same(state_of(model), expected)


def test_workers_go_on_from_one_process(tmp_path):
    path = tmp_path / "checkpoint"
    model = helpers.compiled(None)
    fit(model)
    keras_dist.save_sharded(model, path)
    for restored, _ in launched(restore, TWO, path):
        assert_same(restored, state_of(model), rtol=0, atol=0)


def test_each_worker_writes_its_parts():
    path, _ = saved(TWO)
    (parts,) = path.glob("parts-*")
    if keras.backend.backend() == "jax":
        folders = sorted(parts.glob("arrays/ocdbt.process_*"))
        sizes = [
            sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            for folder in folders
        ]
    else:
        sizes = [each.stat().st_size for each in parts.glob("*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0


def save_again(what, path):
    """Saves twice to one path; the state then."""
    model = compiled(what)
    keras_dist.save_sharded(model, path)
    fit(model)
    keras_dist.save_sharded(model, path)
    return state_of(model)


@pytest.mark.parametrize("kind", [TWO, STATE, MIRRORED])
def test_an_older_one_is_replaced(kind, tmp_path):
    path = tmp_path / "checkpoint"
    states = launched(save_again, kind, path)
    assert len(list(path.iterdir())) == 2
    assert json.loads((path / "checkpoint.json").read_text())
    for state in states:
        assert_same(restored_plainly(path), state, rtol=0, atol=0)


@on_workers()
def test_workers_without_a_shared_folder(tmp_path):
    checkpoint_folder.PATIENCE = 0.2
    own, shared = tmp_path / str(index_of_worker()), tmp_path / "shared"
    own.mkdir()
    model = compiled("variables")
    error = attempted(keras_dist.save_sharded, model, own)
    assert error.startswith("ClusterError: ")
    assert "worker 1 can't see" in error
    keras_dist.save_sharded(model, shared)
    fit(model)
    trained = state_of(model)
    absent = own if index_of_worker() else shared
    error = attempted(keras_dist.restore_sharded, model, absent)
    assert error.startswith("ClusterError: ")
    assert "worker 1 found another" in error
    error = attempted(keras_dist.restore_sharded, model, own)
    assert error.startswith("FileNotFoundError: ")
    assert_same(state_of(model), trained, rtol=0, atol=0)
    assert os.listdir(own) == []


@on_workers()
def test_a_chief_that_can_not_write(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    error = attempted(keras_dist.save_sharded, compiled("variables"), path)
    own = "ClusterError: Worker 0 could not"
    assert error.startswith(own if index_of_worker() else "ValueError: ")


@pytest.mark.parametrize("kind", [TWO, MIRRORED])
def test_workers_train_while_they_save(kind, tmp_path):
    path = tmp_path / "checkpoint"
    expected = launched(save, kind, path, False)[0]
    for _, end in launched(restore, TWO, path):
        assert_same(end, expected)


@pytest.mark.parametrize("wait", [True, False])
@on_workers()
def test_a_worker_that_can_not_write(wait, tmp_path):
    path = tmp_path / "checkpoint"
    model = compiled("variables")
    keras_dist.save_sharded(model, path)
    before = state_of(model)
    fit(model)
    backend = type(get_backend())
    original = backend.save_shards

    def failing(*args):
        writing = original(*args)
        if index_of_worker():
            writing.write = lambda: os.mkdir(path)
        return writing

    backend.save_shards = failing
    try:
        saving = attempted(keras_dist.save_sharded, model, path, wait)
    finally:
        backend.save_shards = original
    fit(model)
    error = saving if wait else attempted(saving.result)
    if index_of_worker():
        assert error.startswith("CheckpointError: ")
        assert "(FileExistsError: " in error
    else:
        told = "ClusterError: Worker 1 could not write its parts"
        assert error.startswith(told)
    # All workers go on, and the older one is whole.
    keras_dist.save_sharded(model, tmp_path / "other")
    keras_dist.restore_sharded(model, path)
    assert_same(state_of(model), before, rtol=0, atol=0)


class Interrupt(keras.callbacks.Callback):
    """Ends training at the second step of one epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.place = epoch, 1

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            raise KeyboardInterrupt


def back_up(what, path, frequency, epoch):
    """Trains until it is interrupted; the files that are there then."""
    backup = keras.callbacks.BackupAndRestore(path, save_freq=frequency)
    with contextlib.suppress(KeyboardInterrupt):
        callbacks = [backup, Interrupt(epoch)]
        fit(compiled(what), epochs=4, callbacks=callbacks)
    return sorted(os.listdir(path))


def go_on(what, path, frequency):
    """The state at the end of the training that was interrupted."""
    model = compiled(what)
    backup = keras.callbacks.BackupAndRestore(path, save_freq=frequency)
    fit(model, epochs=4, callbacks=[backup])
    return state_of(model)


@pytest.mark.parametrize(
    ("saving", "restoring", "frequency"),
    [
        (TWO, THREE, "epoch"),
        (TWO, TWO, 1),
        (TWO, MIRRORED, "epoch"),
        (MIRRORED, TWO, "epoch"),
    ],
)
def test_a_backup_in_parts(saving, restoring, frequency, tmp_path):
    files = launched(back_up, saving, tmp_path, frequency, 2)
    has_parts = "checkpoint.json" in files[0]
    assert has_parts == (saving[0] == "variables")
    assert has_parts != ("latest.weights.h5" in files[0])
    for end in launched(go_on, restoring, tmp_path, frequency):
        assert_same(end, whole())


def test_one_process_does_not_begin_again(tmp_path):
    launched(back_up, TWO, tmp_path, "epoch", 2)
    place = 2, sharded if SHARDS_ON_DEVICES else mirrored
    model = helpers.compiled(*place)
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(ValueError, match="keras_dist.restore_sharded"):
        fit(model, epochs=4, callbacks=[backup])
    keras_dist.restore_sharded(model, tmp_path)
    fit(model, initial_epoch=2, epochs=4)
    assert_same(state_of(model), whole())


def test_the_kind_of_a_backup_may_change(tmp_path):
    launched(back_up, MIRRORED, tmp_path, "epoch", 1)
    files = launched(back_up, TWO, tmp_path, "epoch", 2)[0]
    assert [name[:6] for name in files] == ["checkp", "parts-"]
    files = launched(back_up, MIRRORED, tmp_path, "epoch", 3)[0]
    assert files == ["latest.weights.h5", "training_metadata.json"]
    for end in launched(go_on, TWO, tmp_path, "epoch"):
        assert_same(end, whole())


def preempted(what, path):
    """A worker has to end, and goes on with the state that was saved."""
    config = TerminationConfig(lambda: True, exit_fn=lambda: None)
    states = []
    for calls in (0, 1):
        model = compiled(what)
        handler = PreemptionCheckpointHandler(None, model, path, config)
        assert handler.total_run_calls == calls
        states.append(state_of(model))
        handler.run(fit, model)
        states.append(state_of(model))
    _, ended, restored, _ = states
    assert_same(restored, ended, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [TWO, MIRRORED])
def test_workers_that_have_to_end(kind, tmp_path):
    """They save in parts what is in parts, and the chief saves the rest."""
    launched(preempted, kind, tmp_path)
    sharded = (tmp_path / "preemption" / "checkpoint.json").exists()
    assert sharded == (kind == TWO)
    assert sharded != (tmp_path / "preemption.weights.h5").exists()
