"""What is saved with parts has Keras' layout, and goes on anywhere."""

import keras
import pytest

from parity.harness import assert_same
from parity.harness import scope
from parity.harness import sharded_variables
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import mirrored
from sharded.helpers import sharded
from sharded.helpers import shards
from sharded.helpers import state_of

pytestmark = [shards, pytest.mark.usefixtures("all_are_large")]

# Saved here, loaded there: in plain Keras, or on so many replicas.
PLACES = {
    "plain": (None, mirrored),
    "mirrored_2": (2, mirrored),
    "sharded_2": (2, sharded),
    "sharded_3": (3, sharded),
    "variables_2": (2, sharded_variables),
    "variables_3": (3, sharded_variables),
}
WAYS = [
    ("sharded_2", "plain"),
    ("plain", "sharded_2"),
    ("sharded_2", "sharded_3"),
    ("sharded_3", "mirrored_2"),
    ("variables_2", "plain"),
    ("plain", "variables_3"),
    ("variables_3", "variables_2"),
    ("variables_2", "mirrored_2"),
    ("sharded_2", "variables_2"),
]


def expected():
    """Four epochs in plain Keras, as if nothing had been saved."""
    model = compiled(None)
    fit(model)
    between = state_of(model)
    fit(model)
    return between, state_of(model)


@pytest.mark.filterwarnings("ignore:Model .* trains on one device")
@pytest.mark.parametrize(("saved", "loaded"), WAYS)
def test_a_whole_model(saved, loaded, tmp_path):
    path = str(tmp_path / "model.keras")
    model = compiled(*PLACES[saved])
    fit(model)
    model.save(path)
    with scope(*PLACES[loaded]):
        again = keras.models.load_model(path)
    between, end = expected()
    assert_same(state_of(again), between)
    fit(again)
    assert_same(state_of(again), end)


@pytest.mark.parametrize(("saved", "loaded"), WAYS)
def test_weights(saved, loaded, tmp_path):
    path = str(tmp_path / "some.weights.h5")
    model = compiled(*PLACES[saved])
    fit(model)
    model.save_weights(path)
    again = compiled(*PLACES[loaded])
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    between, end = expected()
    assert_same(state_of(again), between)
    fit(again)
    assert_same(state_of(again), end)


class Interrupted(Exception):
    """Nothing else raises it."""


class Interrupt(keras.callbacks.Callback):
    """Ends training in the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Interrupted


@pytest.mark.parametrize(("saved", "loaded"), WAYS)
def test_a_backup(saved, loaded, tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    model = compiled(*PLACES[saved])
    with pytest.raises(Interrupted):
        fit(model, epochs=4, callbacks=[backup(), Interrupt()])
    again = compiled(*PLACES[loaded])
    fit(again, epochs=4, callbacks=[backup()])
    _, end = expected()
    # `fit` of four epochs overwrites with averages at its end only.
    whole = compiled(None)
    fit(whole, epochs=4)
    assert set(end) == set(state_of(whole))
    assert_same(state_of(again), state_of(whole))
