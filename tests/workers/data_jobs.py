"""What workers run in `test_same_data.py`: data that are not the same."""

from unittest import mock

import keras
import numpy as np

from parity import kinds
from parity import models
from workers.jobs import attempted
from workers.jobs import in_cluster


def moved(columns, by):
    """Columns of rows in another order, as dividing them beforehand gives."""
    return {k: np.roll(v, by, axis=0) for k, v in columns.items()}


def train_kinds(names):
    """Trains on each kind, of which worker 1 has other rows first."""
    strategy = in_cluster()
    index = strategy.cluster_resolver.task_id
    original = models.weighted_table

    def others(rows):
        return moved(original(rows), index)

    # The processes go on to other tests.
    with mock.patch.object(models, "weighted_table", others):
        return {
            name: attempted(kinds.outcome_of, kinds.KINDS[name], 1)
            for name in names
        }


def use_arrays():
    """Calls methods with arguments that differ; a dict of what came of it."""
    strategy = in_cluster()
    index = strategy.cluster_resolver.task_id
    x = np.arange(24, dtype="float32").reshape(12, 2)
    y, own = x[:, :1], np.roll(x, index, axis=0)
    labels = np.arange(12, dtype="int64").reshape(12, 1)
    ones = np.ones(12, "float32")
    weights = np.where(np.arange(12) == index, 2, 1).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        fresh = keras.models.clone_model(model)
        fresh.compile("sgd", "mse")

    def generator():
        # Later batches may differ: only the first is compared.
        yield x, y
        yield own, y

    quiet = {"verbose": 0}
    calls = {
        "y": lambda: model.fit(x, labels + index, **quiet),
        "sample_weight": lambda: model.fit(
            x, y, sample_weight=weights, **quiet
        ),
        "class_weight": lambda: model.fit(
            x, labels % 2, class_weight={0: 1.0, 1: 1.0 + index}, **quiet
        ),
        "validation_data": lambda: model.fit(
            x, y, validation_data=(own, y), **quiet
        ),
        "x of evaluate": lambda: model.evaluate(own, y, **quiet),
        "x of predict": lambda: model.predict(own, **quiet),
        "x of train_on_batch": lambda: fresh.train_on_batch(own, y),
        "validation that is read": lambda: model.fit(
            x, y, validation_data=kinds.Batches([(own, y)]), **quiet
        ),
        "the same": lambda: model.fit(
            x, y, sample_weight=ones, validation_data=(x, y), **quiet
        ),
        "the same first": lambda: model.fit(
            generator(), steps_per_epoch=2, **quiet
        ),
    }
    return {name: attempted(call) for name, call in calls.items()}
