"""`strategy.verify` says the same on all workers; each trains alone, too."""

import keras
import pytest

import keras_dist
from verification import models
from verification.models import TARGETS
from verification.models import X
from verification.models import Y
from workers.clusters import on_workers

pytestmark = pytest.mark.runs_on("torch")


@pytest.mark.parametrize("name", ["same", "all", "last"])
@on_workers()
def test_every_worker_gets_the_same_verdict(name):
    keras.utils.set_random_seed(0)
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index

    def under_the_strategy():
        loss = "mae" if keras_dist.has_strategy() else "mse"
        return models.regressor(loss=loss)

    def on_the_last_worker():
        plain = not keras_dist.has_strategy()
        return models.regressor(loss="mae" if plain and index else "mse")

    make, x, y = {
        "same": (models.classifier, X, Y),
        "all": (under_the_strategy, X, TARGETS),
        "last": (on_the_last_worker, X, TARGETS),
    }[name]
    found = strategy.verify(make, x, y, steps=2)
    assert found.same is (name == "same"), found
    if name != "same":
        assert found.first.kind == "loss"
    of_last = "Worker 1 is the first whose numbers differ."
    assert (of_last in found.notes) is (name == "last")
    return found.to_dict()
