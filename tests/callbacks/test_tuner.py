"""KerasTuner finds under a strategy what it finds without one."""

import keras
import keras_tuner
import pytest

from parity import models
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import scope
from parity.harness import strategy

# Of keras-tuner's own.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(currentThread|getName):DeprecationWarning"
)

BATCH = {"batch_size": 8, "verbose": 0}


def _search(count, folder, by_argument):
    data = models.table(24)

    def network(parameters):
        keras.utils.set_random_seed(3)
        units = parameters.Choice("units", [2, 5])
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(units),
                keras.layers.Dense(1),
            ]
        )
        rate = parameters.Choice("rate", [0.1, 0.01])
        model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=JIT)
        return model

    def in_scope(parameters):
        with scope(count):
            return network(parameters)

    given = {}
    if by_argument and count:
        given["distribution_strategy"] = strategy(count)
    tuner = keras_tuner.GridSearch(
        network if by_argument else in_scope,
        objective="val_loss",
        max_trials=4,
        directory=folder,
        seed=1,
        **given,
    )
    tuner.search(
        data["x"],
        data["y"],
        epochs=2,
        shuffle=False,
        validation_data=(data["x"][:9], data["y"][:9]),
        **BATCH,
    )
    (best,) = tuner.get_best_models(1)
    trials = tuner.oracle.trials.values()
    found = {
        "scores": sorted(trial.score for trial in trials),
        "kept": best.evaluate(**data, **BATCH),
        "more": best.fit(**data, shuffle=False, **BATCH).history,
    }
    return flat("tuner", found)


@pytest.mark.parametrize("by_argument", [False, True])
def test_a_search(tmp_path, by_argument):
    assert_same(
        _search(2, tmp_path / "ours", by_argument),
        _search(None, tmp_path / "plain", by_argument),
    )
