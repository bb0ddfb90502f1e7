"""A backup has all optimizers of a model, and touches no file of the user."""

import h5py
import keras
import numpy as np
import pytest
from keras import callbacks

import keras_dist
from keras_dist.fit.workers.training_state import TrainingState
from parity import gans
from parity.harness import assert_same
from parity.harness import strategy
from unit.test_togetherness import MadeUp
from unit.test_togetherness import fit

FOLDERS = ["parts-2024", "parts-0123456789abcdef", "logs"]
FILES = ["notes.txt", "latest.weights.h5.mine", "checkpoint.json", "parts.txt"]


def model_of():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    return model


def trained(folder, epochs=2, model=None, **options):
    backup = callbacks.BackupAndRestore(folder, **options)
    data = {"x": gans.X, "y": gans.X, "batch_size": 10, "shuffle": False}
    model = model or model_of()
    return fit(model, MadeUp(), **data, epochs=epochs, callbacks=[backup])


@pytest.mark.parametrize("double_checkpoint", [True, False])
def test_what_the_user_keeps_in_the_folder_stays(tmp_path, double_checkpoint):
    folder = tmp_path / "backup"
    trained(folder, double_checkpoint=double_checkpoint)
    assert not folder.exists()  # of backups only, it is removed
    mine = [f"{name}/mine.txt" for name in FOLDERS] + FILES
    for path in (folder / name for name in mine):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    (folder / "data").symlink_to(tmp_path)
    before = sorted(folder.rglob("*"))
    trained(folder, double_checkpoint=double_checkpoint)
    assert sorted(folder.rglob("*")) == before
    assert {(folder / name).read_text() for name in mine} == {"precious"}


def test_a_backup_that_is_a_link(tmp_path):
    folder, disk = tmp_path / "backup", tmp_path / "disk"
    trained(folder, delete_checkpoint=False)
    latest = folder / "latest.weights.h5"
    latest.rename(disk)
    latest.symlink_to(disk)
    before = disk.read_bytes()
    assert trained(folder, 3, delete_checkpoint=False).epoch == [2]
    assert latest.is_symlink()
    assert disk.read_bytes() != before


def state_in(folder, model):
    """The state that the chief saves as one file."""
    return TrainingState(model, folder, str(folder / "some.weights.h5"))


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        raise KeyboardInterrupt


def test_a_damaged_backup_takes_nothings_place(tmp_path):
    """Until there is a new one, the two files stay as they are."""
    options = {"double_checkpoint": True, "delete_checkpoint": False}
    trained(tmp_path, **options)
    latest = tmp_path / "latest.weights.h5"
    latest.write_bytes(b"torn")
    previous = (tmp_path / "latest.weights.h5.bkp").read_bytes()
    data = {"x": gans.X, "y": gans.X, "epochs": 3}
    backup = callbacks.BackupAndRestore(tmp_path, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(model_of(), MadeUp(), **data, callbacks=[backup, Stop()])
    assert latest.read_bytes() == b"torn"
    assert trained(tmp_path, 2, **options).epoch == [1]
    # The whole one was kept while the other was replaced.
    assert (tmp_path / "latest.weights.h5.bkp").read_bytes() == previous


def test_other_optimizers_are_refused(tmp_path):
    model, again = gans.made(is_built=False), gans.made(is_built=False)
    state_in(tmp_path, model).save()
    state_in(tmp_path, again).restore()
    assert not again.g_optimizer.built
    with pytest.raises(ValueError, match=r"(?s)built for 2 variables .*kernel"):
        state_in(tmp_path, gans.made()).restore()
    state_in(tmp_path, gans.made("dict")).save()
    with pytest.raises(ValueError, match="other optimizers") as raised:
        state_in(tmp_path, gans.made("list")).restore()
    for place in ("optimizers['g']", "optimizers[0]"):
        assert f"`model.{place}`" in str(raised.value)
    # A file of Keras' own says nothing of those that were not built.
    gans.made("compiled").save_weights(tmp_path / "some.weights.h5")
    with pytest.raises(ValueError, match="Skipping variable loading"):
        state_in(tmp_path, gans.made("compiled", is_built=False)).restore()


def test_an_older_file(tmp_path):
    model, again = gans.made("compiled"), gans.made("compiled")
    gans.fit(strategy(2).distribute(model))
    state_in(tmp_path, model).save()
    with h5py.File(tmp_path / "some.weights.h5", "a") as file:
        length = len(file["keras_dist"])
        notes = b"{}" + b" " * (length - 2)  # of no optimizers
        file["keras_dist"][:] = np.frombuffer(notes, "uint8")
    state_in(tmp_path, again).restore()
    assert_same(gans.state_of(again), gans.state_of(model), rtol=0, atol=0)


def test_an_optimizer_of_variables_that_are_not_saved(tmp_path):
    model = gans.made()
    layer = keras.layers.Dense(2)
    layer.build((None, 4))
    model.more = gans.adam()
    model.more.build(layer.trainable_variables)
    with pytest.raises(
        keras_dist.UnsupportedModelError,
        match=r"(?s)`model\.more` was built for the variable '.*kernel'",
    ):
        state_in(tmp_path, model).save()


def test_a_model_without_trainable_variables(tmp_path):
    """Its optimizer has nothing to build slots for."""

    def made():
        layer = keras.layers.Normalization(mean=1.0, variance=1.0)
        frozen = keras.layers.Dense(1, kernel_initializer="ones")
        frozen.trainable = False
        model = keras.Sequential([keras.Input((2,)), layer, frozen])
        model.compile("sgd", "mse")
        return model

    saved, other = made(), made()
    saved.layers[-1].kernel.assign(np.full((2, 1), 3.0))
    state_in(tmp_path, saved).save({"epoch": 4})
    assert state_in(tmp_path, other).restore() == {"epoch": 4}
    for own, expected in zip(
        other.get_weights(), saved.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(own, expected)
