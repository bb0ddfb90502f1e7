"""What workers run in `test_verify.py`."""

import keras

import keras_dist
from verification import models
from verification.models import TARGETS
from verification.models import X
from verification.models import Y


def verified():
    """Reports of a model that is the same, and of two that are not."""
    keras.utils.set_random_seed(0)
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index

    def under_the_strategy():
        loss = "mae" if keras_dist.has_strategy() else "mse"
        return models.regressor(loss=loss)

    def on_the_last_worker():
        plain = not keras_dist.has_strategy()
        return models.regressor(loss="mae" if plain and index else "mse")

    given = {
        "same": (models.classifier, X, Y),
        "all": (under_the_strategy, X, TARGETS),
        "last": (on_the_last_worker, X, TARGETS),
    }
    return {
        name: strategy.verify(make, x, y, steps=2).to_dict()
        for name, (make, x, y) in given.items()
    }
