"""Workers that were given different data of one length are told so."""

import os
from unittest import mock

import keras
import numpy as np
import pytest

from parity import kinds
from parity import models
from parity.harness import BACKEND
from workers.clusters import on_workers
from workers.jobs import attempted
from workers.jobs import in_cluster
from workers.test_fit import marked_kinds

TOLD = "ReplicaDivergenceError: Workers were given"


def moved(columns, by):
    """Columns of rows in another order, as dividing them beforehand gives."""
    return {k: np.roll(v, by, axis=0) for k, v in columns.items()}


@pytest.mark.parametrize("kind", marked_kinds())
@on_workers()
def test_every_kind_of_data(kind):
    """Worker 1 has other rows first."""
    index = in_cluster().cluster_resolver.task_id
    original = models.weighted_table

    def others(rows):
        return moved(original(rows), index)

    # The processes go on to other tests.
    with mock.patch.object(models, "weighted_table", others):
        told = attempted(kinds.outcome_of, kinds.KINDS[kind], 1)
    assert isinstance(told, str)
    assert told.startswith(TOLD)
    assert "another `x` on worker 1 than on worker 0" in told
    assert f"On worker {index} it begins with" in told
    assert "distribute_datasets_from_function" in told


@on_workers()
def test_every_argument():
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

    def fit(x, y, **options):
        return model.fit(x, y, verbose=0, **options)

    read = kinds.Batches([(own, y)])
    ratio = {0: 1.0, 1: 1.0 + index}
    for name, call in (
        ("y", lambda: fit(x, labels + index)),
        ("sample_weight", lambda: fit(x, y, sample_weight=weights)),
        ("class_weight", lambda: fit(x, labels % 2, class_weight=ratio)),
        ("validation_data", lambda: fit(x, y, validation_data=(own, y))),
        ("validation_data", lambda: fit(x, y, validation_data=read)),
        ("x", lambda: model.evaluate(own, y, verbose=0)),
        ("x", lambda: model.predict(own, verbose=0)),
        ("x", lambda: fresh.train_on_batch(own, y)),
    ):
        told = attempted(call)
        assert told.startswith(TOLD)
        assert f"another `{name}`" in told

    fit(x, y, sample_weight=ones, validation_data=(x, y))


def _later(index, kind):
    """Batches of which one is another on worker 1, after the first."""
    rng = np.random.default_rng(3)
    for batch in range(4):
        x = rng.normal(size=(4, 2)).astype("float32")
        y = np.full((4, 1), 1.0 if kind == "floats" else batch)
        if batch == 2 and index and kind != "alike":
            x, y = (x[::-1].copy(), y) if kind == "floats" else (x, y + 1)
        yield x, y.astype("float32" if kind == "floats" else "int32")


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="TensorFlow reads in its own program"
)
@on_workers()
def test_batches_that_differ_later():
    strategy = in_cluster()
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for kind in ("floats", "integers", "alike"):

        def fit(kind=kind, **options):
            data = (batch for batch in _later(index, kind))
            model.fit(data, steps_per_epoch=2, epochs=2, verbose=0, **options)

        with mock.patch.dict(os.environ, KERAS_DIST_CHECK_DATA="0"):
            fit()
        if kind == "alike":
            fit()
        else:
            told = attempted(fit)
            assert "in different orders" in told
            assert "other rows on worker 1 than on worker 0" in told
