"""What is saved with parts, or on a device apart, goes on anywhere."""

import keras
import pytest

from parity.harness import assert_same
from parity.harness import scope
from sharded.helpers import PLACES
from sharded.helpers import SHARDS_ON_DEVICES
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import state_of

pytestmark = pytest.mark.usefixtures("all_are_large")

WAYS = [("central_2", "plain"), ("plain", "central_2")]
if SHARDS_ON_DEVICES:
    WAYS += [
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
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("saved", "loaded"), WAYS)
def test_files_of_keras(saved, loaded, whole, tmp_path):
    model = compiled(*PLACES[saved])
    fit(model)
    if whole:
        path = str(tmp_path / "model.keras")
        model.save(path)
        with scope(*PLACES[loaded]):
            again = keras.models.load_model(path)
    else:
        path = str(tmp_path / "some.weights.h5")
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
