"""Workers train and save as one, and a resumed run is the unbroken one.

The other workers are made up.
"""

import contextlib
import json
import os
import random
import stat
import types
from unittest import mock

import h5py
import keras
import numpy as np
import pytest
from keras import callbacks

import keras_dist
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit.workers import chief_saves
from keras_dist.fit.workers.agreement import compare
from keras_dist.fit.workers.callbacks import flat_callbacks
from keras_dist.fit.workers.callbacks import quiet_callbacks
from keras_dist.fit.workers.entry import Entry
from keras_dist.fit.workers.entry import batches_of
from keras_dist.fit.workers.entry import described
from keras_dist.fit.workers.entry import rows_of
from keras_dist.fit.workers.sync import SyncCallback
from keras_dist.fit.workers.sync import take_chiefs_values
from keras_dist.fit.workers.sync import written_beside
from keras_dist.plugin import randomness
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.front_end import BOUND
from keras_dist.plugin.workers import Workers

ROWS, BATCH, EPOCHS = 11, 4, 3


class MadeUp(Workers):
    """Workers of which this process is one, and the others are made up.

    Args:
        index: Integer, which one this is.
        others: Callable from this worker's numbers to those of the other
            ones, a list each.
        texts: List of what the other one says, in turn.
    """

    def __init__(self, index=0, others=lambda own: [], texts=()):
        count = 1 + len(others([0] * 40)) if index == 0 else 2
        addresses = tuple(f"127.0.0.1:{9000 + i}" for i in range(count))
        cluster = Cluster(index, addresses[0], addresses)
        super().__init__(cluster, CommunicationOptions())
        self.others = others
        self.texts_of_other = list(texts)
        self.broadcasts = 0

    def swap(self, own):
        raise NotImplementedError

    def swap_bytes(self, what, layout, own):
        if layout.endswith("integers"):
            numbers = np.frombuffer(own, np.int64).tolist()
            others = [np.array(n) for n in self.others(numbers)]
            told = [each.astype(np.int64).tobytes() for each in others]
        else:
            told = [text.encode() for text in self.texts_of_other[:1]]
            del self.texts_of_other[:1]
        everyone = [own, *told]
        if self.cluster.index:
            everyone.reverse()
        return everyone

    def broadcast(self, tensors):
        self.broadcasts += 1
        return list(tensors)


def save(model, name, workers, *args, **kwargs):
    """Calls `model.save`, say, as one of these workers."""
    executor = types.SimpleNamespace(workers=workers)
    strategy = types.SimpleNamespace(executor=executor)
    with mock.patch.object(chief_saves, "strategy_of", lambda model: strategy):
        chief_saves.method_of(model, name)(*args, **kwargs)


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def model_of():
    keras.utils.set_random_seed(3)
    dense, dropout = keras.layers.Dense, keras.layers.Dropout
    model = keras.Sequential(
        [keras.Input((3,)), dense(5), dropout(0.3, seed=7), dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def belonging(model):
    """A model with what a strategy of one worker notes about it."""
    executor = types.SimpleNamespace(workers=None)
    plan = keras_dist.MirroredStrategy(["cpu:0"]).plan
    model.__dict__[BOUND] = types.SimpleNamespace(
        strategy=types.SimpleNamespace(
            executor=executor, plan=plan, scope=contextlib.nullcontext
        ),
        **dict.fromkeys(("compiled", "layers", "compared")),
    )
    return model


def executor_of(workers):
    """What an `Entry` asks of an executor."""
    native = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).executor
    return types.SimpleNamespace(
        workers=workers,
        watch_first=native.watch_first,
        own_rows_of=lambda model: None,
    )


def fit(model, workers, **kwargs):
    executor = executor_of(workers)
    entry = Entry(
        "fit", belonging(model), executor, (), {"verbose": 0, **kwargs}
    )
    entry.agree()
    return entry.run()


class Batches(keras.utils.PyDataset):
    """Batches that Keras shuffles, with noise from global random states."""

    @property
    def num_batches(self):
        return 3

    def __getitem__(self, index):
        x, y = data()
        rows = slice(index * BATCH, (index + 1) * BATCH)
        noise = np.float32(random.random() + np.random.random())
        return x[rows] + noise, y[rows]


class Interrupt(callbacks.Callback):
    """Stops training after a batch, as a process does that is killed."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = (epoch, batch)
        self.heard = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append((self.epoch, batch))
        if (self.epoch, batch) == self.at:
            raise KeyboardInterrupt


KINDS = {
    "arrays": lambda: dict(zip("xy", data(), strict=True), batch_size=BATCH),
    "batch_shuffle": lambda: KINDS["arrays"]() | {"shuffle": "batch"},
    "py_dataset": lambda: {"x": Batches()},
}


@pytest.mark.parametrize(
    ("kind", "frequency", "at", "first"),
    [
        ("arrays", "epoch", (1, 1), (1, 0)),
        ("arrays", 2, (1, 1), (1, 1)),
        ("batch_shuffle", 2, (1, 1), (1, 1)),
        ("py_dataset", 2, (2, 1), (2, 0)),
        ("py_dataset", 5, (2, 0), (1, 2)),
        ("arrays", 3, (2, 0), (1, 3)),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(
    kind, frequency, at, first, tmp_path
):
    workers = MadeUp()
    options = KINDS[kind]()

    def trained(model, *more):
        backup = callbacks.BackupAndRestore(
            tmp_path / "backup", save_freq=frequency
        )
        scheduler = callbacks.LearningRateScheduler(lambda _, r: 0.9 * r)
        return fit(
            model,
            workers,
            **options,
            epochs=EPOCHS,
            callbacks=[scheduler, backup, *more],
            validation_data=data(),
        ).history

    unbroken = model_of()
    expected = trained(unbroken)
    with pytest.raises(KeyboardInterrupt):
        trained(model_of(), Interrupt(*at))
    keras.utils.set_random_seed(99)
    random.seed(98)
    model, listener = model_of(), Interrupt(None, None)
    found = trained(model, listener)
    for weight, other in zip(
        model.get_weights(), unbroken.get_weights(), strict=True
    ):
        np.testing.assert_allclose(weight, other, rtol=1e-6, atol=1e-6)
    every = [(epoch, batch) for epoch in (1, 2) for batch in range(3)]
    assert listener.heard == [each for each in every if each >= first]
    whole = len(found["loss"])
    left = expected["loss"][-whole:]
    np.testing.assert_allclose(found["loss"], left, rtol=1e-5)
    assert not (tmp_path / "backup").exists()


def test_an_error_while_steps_are_skipped_leaves_nothing_behind(tmp_path):
    class Breaking(Batches):
        is_broken = False

        def __getitem__(self, index):
            if Breaking.is_broken:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    def trained(listener):
        backup = callbacks.BackupAndRestore(tmp_path, save_freq=2)
        fit(
            model,
            MadeUp(),
            x=Breaking(),
            epochs=2,
            callbacks=[backup, listener],
        )

    model = model_of()
    with pytest.raises(KeyboardInterrupt):
        trained(Interrupt(1, 2))
    Breaking.is_broken = True
    listener = Interrupt(None, None)
    # Each framework has an error of its own for failing data.
    with pytest.raises(Exception, match="the disk is gone"):
        trained(listener)
    assert not {*vars(listener)} & {
        *("on_train_batch_begin", "on_train_batch_end")
    }
    assert model._initial_epoch is None


def test_a_second_fit_begins_at_the_beginning(tmp_path):
    model, options = model_of(), KINDS["arrays"]() | {"epochs": 2}
    for deletes, epochs in ((False, [0, 1]), (True, [])):
        backup = callbacks.BackupAndRestore(tmp_path, delete_checkpoint=deletes)
        found = fit(model, MadeUp(), **options, callbacks=[backup])
        assert found.epoch == epochs
    assert fit(model, MadeUp(), **options).epoch == [0, 1]


def test_keras_reads_our_backups_and_we_read_those_of_keras(tmp_path):
    options = KINDS["arrays"]() | {"verbose": 0}

    def backup():
        return callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)

    ours, theirs, again = model_of(), model_of(), model_of()
    fit(ours, MadeUp(), **options, epochs=2, callbacks=[backup()])
    theirs.fit(**options, epochs=3, callbacks=[backup()])
    assert theirs.history.epoch == [2]
    os.remove(tmp_path / "latest.weights.h5")
    theirs.save_weights(tmp_path / "latest.weights.h5")
    fit(again, MadeUp(), **options, epochs=4, callbacks=[backup()])
    assert again.history.epoch == [3]


@pytest.mark.parametrize("keeps_previous", [True, False])
def test_a_backup_whose_bytes_changed_is_not_used(tmp_path, keeps_previous):
    """HDF5 reads it all the same."""

    def resumed(epochs):
        callback = callbacks.BackupAndRestore(
            tmp_path, double_checkpoint=True, delete_checkpoint=False
        )
        options = {"epochs": epochs, "callbacks": [callback]}
        return fit(model_of(), MadeUp(), **KINDS["arrays"](), **options).epoch

    assert resumed(2) == [0, 1]
    path = tmp_path / "latest.weights.h5"
    with h5py.File(path) as file:
        value = next(_values_in(file))
        start = value.id.get_offset()
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    with h5py.File(path):
        pass
    if keeps_previous:
        assert resumed(3) == [1, 2]
        return
    (tmp_path / "latest.weights.h5.bkp").unlink()
    with pytest.raises(OSError, match="is damaged"):
        resumed(3)


def _values_in(group):
    for item in group.values():
        if isinstance(item, h5py.Group):
            yield from _values_in(item)
        elif item.dtype.kind == "f" and item.id.get_offset() is not None:
            yield item


def test_files_are_on_the_disk_before_they_take_a_place(tmp_path, monkeypatch):
    done = []

    def fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else "file")

    def replace(*paths):
        done.append("replace")
        os.rename(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with (
        written_beside(str(tmp_path / "file")) as beside,
        open(beside, "w") as file,
    ):
        file.write("text")
    assert done == ["file", "replace", "folder"]


def test_a_save_that_fails_leaves_the_model_from_before(tmp_path):
    class Failing(keras.layers.Dense):
        fails = False

        def save_own_variables(self, store):
            if Failing.fails:
                raise OSError("the disk is full")
            super().save_own_variables(store)

    model = keras.Sequential([keras.Input((3,)), Failing(1)])
    for name in ("whole.keras", "only.weights.h5"):
        path = tmp_path / name
        method = "save" if name.endswith(".keras") else "save_weights"
        Failing.fails = False
        save(model, method, MadeUp(), path)
        before = path.read_bytes()
        Failing.fails = True
        with pytest.raises(OSError, match="full"):
            save(model, method, MadeUp(), path)
        assert path.read_bytes() == before
    assert len(os.listdir(tmp_path)) == 2


def test_one_worker_saves(tmp_path):
    other = MadeUp(1)
    save(model_of(), "save", other, tmp_path / "a.keras")
    save(model_of(), "export", other, filepath=tmp_path / "exported")
    assert not os.listdir(tmp_path)
    # In pieces, as Keras does.
    path = tmp_path / "pieces.weights.json"
    save(model_of(), "save_weights", MadeUp(), path, max_shard_size=1)
    assert path.name in os.listdir(tmp_path)


def test_callbacks_that_write_are_left_out_elsewhere(tmp_path):
    class OwnCheckpoint(callbacks.ModelCheckpoint):
        pass

    class Own(callbacks.Callback):
        verbose = 1

    own, stopping = Own(), callbacks.EarlyStopping(verbose=1)
    given = [
        OwnCheckpoint(tmp_path / "a.keras"),
        [callbacks.CSVLogger(tmp_path / "a.csv"), own],
        callbacks.ProgbarLogger(),
        stopping,
    ]
    assert quiet_callbacks(flat_callbacks(given)) == [own, stopping]
    # Saving takes all workers then: theirs write nothing.
    kept = quiet_callbacks(flat_callbacks(given), keeps_shards=True)
    assert kept == [given[0], own, stopping]
    assert given[0].verbose == 0
    assert (own.verbose, stopping.verbose) == (1, 0)
    assert flat_callbacks(None) == []
    assert flat_callbacks(own) == [own]


def test_a_checkpoint_that_every_worker_would_write_is_refused(monkeypatch):
    class Orbax(callbacks.Callback):
        pass

    monkeypatch.setattr(callbacks, "OrbaxCheckpoint", Orbax, raising=False)
    with pytest.raises(ClusterError, match="every worker would write"):
        flat_callbacks([Orbax()])


def test_what_a_call_is_compared_by():
    x, y = data()
    assert rows_of(x) == rows_of({"a": x}) == rows_of([x, y]) == ROWS
    assert rows_of(None) is rows_of(Batches()) is None
    assert batches_of(Batches()) == 3
    assert batches_of(x) is batches_of([x]) is batches_of(iter([x])) is None

    class Endless(keras.utils.PyDataset):
        num_batches = None

    assert batches_of(Endless()) is None
    assert batches_of(keras.utils.PyDataset()) is None
    fitted = described("fit", {"x": x, "y": y, "validation_data": (x, y)})
    assert fitted["rows of the validation data"] == str(ROWS)
    assert fitted["shuffle"] == described("fit", {"shuffle": 1})["shuffle"]
    assert described("fit", {"shuffle": "batch"})["shuffle"] == "batch"
    assert described("fit", {"epochs": np.int64(3)})["epochs"] == "3"
    for nothing in (None, 0):
        told = described("fit", {"initial_epoch": nothing})
        assert told == described("fit", {})


def test_workers_that_are_alike_learn_each_others_numbers():
    workers = MadeUp(others=lambda own: [[*own[:-1], 8]])
    found = compare({"epochs": "3"}, workers, "`fit`", [6, 7])
    assert found == [[6, 7], [6, 8]]


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({"epochs": "4"}, "epochs: 3 on worker 0, 4 on worker 2"),
        ({}, "epochs: 3 on worker 0, nothing on worker 2"),
    ],
)
def test_a_difference_is_told_with_both_texts(theirs, told):
    workers = MadeUp(others=lambda own: [own, [own[0] ^ 1]])
    texts = [json.dumps({"a": "1", **own}) for own in ({"epochs": "3"}, theirs)]
    workers.texts = lambda own: [own, *texts]
    with pytest.raises(ReplicaDivergenceError, match=f"Received: {told}\\. "):
        compare({"a": "1", "epochs": "3"}, workers, "`fit`")


@pytest.mark.parametrize("chief_has_drawn", [False, True])
def test_random_states_become_the_chiefs(chief_has_drawn):
    backend = get_backend()

    def draw():
        noise = keras.ops.convert_to_numpy(keras.random.uniform((2,)))
        return random.random(), np.random.random(), noise.tolist()

    keras.utils.set_random_seed(4)
    if chief_has_drawn:
        draw()
    chiefs = randomness.random_state(backend)
    # Equal ones are left alone.
    workers = MadeUp(others=lambda own: [own])
    randomness.share_random_state(backend, workers)
    assert workers.broadcasts == 0
    expected = draw()
    assert draw() != expected
    workers = MadeUp(1, lambda own: [[1] * len(own)], texts=[chiefs])
    randomness.share_random_state(backend, workers)
    assert randomness.random_state(backend) == chiefs
    assert draw() == expected


def test_decisions_are_those_of_any_worker_and_rates_the_chiefs():
    def others(own):
        rate = int(np.float32(0.25).view("int32"))
        return [[1, *own[1:6], rate][: len(own)]]

    model = belonging(model_of())
    model.stop_training = False
    sync = SyncCallback(MadeUp(1, others), False)
    sync.set_model(model)
    sync.on_epoch_end(0)
    assert model.stop_training
    rate = keras.ops.convert_to_numpy(model.optimizer.learning_rate)
    assert rate == np.float32(0.25)
    # Schedules are not compared.
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model.compile(keras.optimizers.SGD(schedule), "mse")
    model.stop_training = False
    sync = SyncCallback(MadeUp(0, lambda own: [[0] * len(own)]), True)
    sync.set_model(model)
    sync.on_epoch_begin(0)
    assert not model.stop_training


BIAS = "variable 1 (here 'd/bias'): float32 of shape (3,) (new) on worker 0, "


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (["(2, 3)", "(4,)"], f"{BIAS}float32 of shape (4,) (new) on worker 1"),
        (["(2, 3)"], f"{BIAS}nothing on worker 1"),
    ],
)
def test_another_model_is_told_with_what_differs(theirs, told):
    facts = {
        f"variable {index}": f"float32 of shape {shape} (new)"
        for index, shape in enumerate(theirs)
    }
    layer = keras.layers.Dense(3, name="d")
    layer.build((None, 2))
    workers = MadeUp(
        others=lambda own: [[own[0] ^ 1, own[1]]], texts=[json.dumps(facts)]
    )
    with pytest.raises(ReplicaDivergenceError) as raised:
        take_chiefs_values(layer.variables, workers)
    assert f"Received: {told}. " in str(raised.value)
