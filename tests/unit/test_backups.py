"""Backups of `BackupAndRestore` on workers: what they have, and whose files."""

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

MINE = ["notes.txt", "latest.weights.h5.mine", "checkpoint.json", "parts.txt"]
lazily = pytest.mark.only_on(
    "tensorflow", "torch", reason="On JAX, a step can't make variables."
)


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
    for name in ("parts-2024", "parts-0123456789abcdef", "logs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.txt").write_text("precious")
    for name in MINE:
        (folder / name).write_text("precious")
    link = folder / "data"
    link.symlink_to(tmp_path)
    before = sorted(folder.rglob("*"))
    trained(folder, double_checkpoint=double_checkpoint)
    assert sorted(folder.rglob("*")) == before
    for name in MINE:
        assert (folder / name).read_text() == "precious"


def test_a_folder_of_backups_only_is_removed(tmp_path):
    folder = tmp_path / "backup"
    trained(folder, double_checkpoint=True)
    assert not folder.exists()


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


@pytest.mark.parametrize("kind", gans.KINDS)
def test_all_optimizers_are_restored(kind, tmp_path):
    model = strategy(2).distribute(gans.made(kind))
    gans.fit(model)
    state_in(tmp_path, model).save()
    again = gans.made(kind)
    state_in(tmp_path, again).restore()
    assert_same(gans.state_of(again), gans.state_of(model), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dict", "parts", "scaled"])
def test_optimizers_that_the_first_step_builds(kind, tmp_path):
    with strategy(2).scope():
        model = gans.made(kind)
    gans.fit(model)
    state_in(tmp_path, model).save()
    with strategy(2).scope():
        again = gans.made(kind, is_built=False)
    state_in(tmp_path, again).restore()
    assert_same(gans.state_of(again), gans.state_of(model), rtol=0, atol=0)
    gans.fit(model)
    gans.fit(again)
    assert_same(gans.state_of(again), gans.state_of(model))


def test_optimizers_that_were_not_built(tmp_path):
    model, again = gans.made(is_built=False), gans.made(is_built=False)
    state_in(tmp_path, model).save()
    state_in(tmp_path, again).restore()
    assert not again.g_optimizer.built
    with pytest.raises(ValueError, match=r"built for 2 variables .*kernel"):
        state_in(tmp_path, gans.made()).restore()


def test_other_optimizers(tmp_path):
    state_in(tmp_path, gans.made("dict")).save()
    with pytest.raises(ValueError, match="other optimizers") as raised:
        state_in(tmp_path, gans.made("list")).restore()
    for place in ("optimizers['g']", "optimizers[0]"):
        assert f"`model.{place}`" in str(raised.value)


def test_a_loss_of_which_keras_only_warns(tmp_path):
    """The file is Keras' own, and says nothing of unbuilt optimizers."""
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
        match=r"`model\.more` was built for the variable '.*kernel'",
    ):
        state_in(tmp_path, model).save()


def test_an_optimizer_that_can_not_be_found(tmp_path):
    model = model_of()
    model.more = {gans.adam()}
    with pytest.raises(keras_dist.UnsupportedModelError, match="in a set"):
        trained(tmp_path, model=model)


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
