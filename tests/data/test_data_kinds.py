"""`fit` gives one device's numbers on every kind of data that Keras takes."""

import keras
import numpy as np
import pytest

from inputs.helpers import installed
from keras_versions import COUNTS_THE_END
from parity import kinds
from parity import models
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import drop_iterations
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of
from parity.kinds import BATCH_SIZE
from parity.kinds import ROWS
from parity.kinds import outcome_of

# Keras says it of every source whose length it did not know.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("numpy", marks=pytest.mark.smoke),
        "tensors",
        pytest.param("py_dataset", marks=pytest.mark.smoke),
        "py_dataset_workers",
        "generator",
        pytest.param("tf_data", marks=installed("tensorflow")),
        pytest.param("torch_loader", marks=installed("torch")),
        pytest.param("grain_map", marks=installed("grain")),
        pytest.param("grain_iter", marks=installed("grain")),
    ],
)
def test_kind(name):
    make = kinds.KINDS[name]
    actual, expected = outcome_of(make, 3), outcome_of(make, None)
    if name.startswith("grain"):
        drop_iterations(actual, expected)
    assert_same(actual, expected)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_nested_structures(num_replicas):
    """Dicts of inputs, outputs and sample weights, from a generator."""
    data = models.weighted_many(ROWS)
    loss = {
        "value": "mse",
        "kind": "sparse_categorical_crossentropy",
        "sign": "binary_crossentropy",
    }

    def outcome(count):
        model = compiled(count, models.two_headed, loss=loss)
        batches = (each for each in kinds.slices(tuple(data.values())))
        history = model.fit(batches, shuffle=False, verbose=0).history
        predictions = model.predict(data["x"], BATCH_SIZE, verbose=0)
        return (
            flat("history", history)
            | flat("predict", predictions)
            | state_of(model)
        )

    actual, expected = outcome(num_replicas), outcome(None)
    drop_iterations(actual, expected)
    if COUNTS_THE_END:
        steps = -(-ROWS // BATCH_SIZE)
        for name in loss:
            expected[f"history/{name}_loss/0"] *= (steps + 1) / steps
    assert_same(actual, expected)


SETTINGS = {
    "shuffle": {"shuffle": True, "batch_size": BATCH_SIZE},
    "shuffle_in_batches": {"shuffle": "batch", "batch_size": BATCH_SIZE},
    "default_batch_size": {},
    "validation_split": {"validation_split": 0.3, "batch_size": BATCH_SIZE},
    "validation_batches": {
        "validation_data": tuple(models.weighted_table(11).values()),
        "validation_batch_size": 4,
        "validation_steps": 2,
        "validation_freq": 2,
        "batch_size": BATCH_SIZE,
    },
    "steps_per_epoch": {"steps_per_epoch": 1, "batch_size": BATCH_SIZE},
    "initial_epoch": {"initial_epoch": 1, "batch_size": BATCH_SIZE},
    "sample_weight": {
        "sample_weight": models.weights_of(ROWS),
        "batch_size": BATCH_SIZE,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name):
    data = models.table(ROWS)

    def make():
        return data, SETTINGS[name]

    assert_same(outcome_of(make, 2), outcome_of(make, None))


def test_infinite_generator():
    def endless():
        while True:
            yield from kinds.slices(tuple(models.table(ROWS).values()))

    def make():
        return {"x": endless()}, {
            "steps_per_epoch": 4,
            "validation_data": endless(),
            "validation_steps": 2,
            "shuffle": False,
        }

    assert_same(outcome_of(make, 3), outcome_of(make, None))


def test_batches_of_every_size():
    """Each size from 1 to 9 in one epoch, then again."""

    def make():
        data = models.table(45)
        edges = np.cumsum([0, 4, 1, 7, 2, 9, 3, 8, 5, 6])
        batches = [
            (data["x"][start:stop], data["y"][start:stop])
            for start, stop in zip(edges[:-1], edges[1:], strict=True)
        ]
        return {"x": kinds.Batches(batches)}, {"shuffle": False}

    assert_same(outcome_of(make, 4), outcome_of(make, None))


def test_generator_is_read_once_in_order():
    """Distribution takes no batch of the user's for itself."""
    read = []

    def batches():
        columns = tuple(models.table(ROWS).values())
        for index, batch in enumerate(kinds.slices(columns)):
            read.append(index)
            yield batch

    with scope(3):
        model = kinds.compiled(keras.Sequential([keras.layers.Dense(1)]))
    model.fit(batches(), shuffle=False, verbose=0)
    assert read == [0, 1, 2]


def test_predict_and_evaluate_every_kind_of_rows():
    """Fewer rows than replicas, and as the last batch."""
    with scope(4):
        model = kinds.compiled(set_initial_weights(models.mlp()))
    plain = kinds.compiled(set_initial_weights(models.mlp()))
    for rows, size in ((1, 8), (3, 8), (9, 8), (10, 4), (5, 1)):
        data = models.table(rows)
        for method in ("predict", "evaluate"):
            given = {"x": data["x"]} if method == "predict" else data
            options = {"batch_size": size, "verbose": 0}
            assert_same(
                flat(method, getattr(model, method)(**given, **options)),
                flat(method, getattr(plain, method)(**given, **options)),
            )
