"""`fit` reads the global batches that a distributed dataset was made of."""

import gc

import keras
import numpy as np
import pytest

from inputs import test_sources
from inputs.helpers import PER_REPLICA
from inputs.helpers import distributed
from inputs.helpers import from_function
from inputs.helpers import installed
from inputs.test_sources import KINDS
from parity.kinds import Batches
from parity.kinds import slices

# Keras says it of every source whose length it did not know.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

ROWS, BATCH_SIZE = 11, 4
COLUMNS = (
    np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3) / 9,
    np.arange(ROWS, dtype="float32")[:, None],
)


def _weights(data, epochs=2, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.fit(data, epochs=epochs, shuffle=False, verbose=0, **options)
    gc.collect()
    return model.get_weights()


def _assert_same(actual, expected):
    for weight, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-6)


@pytest.fixture(scope="module")
def expected():
    keras.utils.set_random_seed(0)
    return _weights(Batches(slices(COLUMNS, BATCH_SIZE)))


@pytest.mark.parametrize(("make", "cardinality"), KINDS)
def test_every_kind_is_read_in_each_epoch(make, cardinality):
    """By Keras itself if it can, else as if it were a `PyDataset`."""
    made = make()
    given = distributed(made, 2).global_batches()
    if given is not made:
        plain = Batches(slices(test_sources.COLUMNS, BATCH_SIZE))
        _assert_same(_weights(given), _weights(plain))


def test_a_dataset_of_each_replica_has_the_same_weights(expected):
    def dataset_fn(context):
        own = slice(2 * context.input_pipeline_id, None)
        return [
            keras.tree.map_structure(lambda x: x[own][:2], batch)
            for batch in slices(COLUMNS, BATCH_SIZE)
        ]

    data = from_function(dataset_fn, 2, PER_REPLICA)
    _assert_same(_weights(data.global_batches()), expected)


@pytest.mark.parametrize("is_split", [True, False])
def test_a_generator_has_both_epochs_in_it(is_split, expected):
    batches = slices(COLUMNS, BATCH_SIZE if is_split else 2) * 2
    if is_split:
        data = distributed((batch for batch in batches), 2)
        assert data.element_spec[0].values[0].shape == (None, 3)
    else:
        data = from_function(lambda _: (batch for batch in batches), 2)
    _assert_same(_weights(data.global_batches(), steps_per_epoch=3), expected)


def test_batches_are_read_once_in_order():
    read = []

    def batches():
        for index, batch in enumerate(slices(COLUMNS, BATCH_SIZE)):
            read.append(index)
            yield batch

    _weights(distributed(batches, 2).global_batches(), epochs=1)
    assert read == [0, 1, 2]


def test_predict_of_bare_arrays():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    data = distributed(slices(COLUMNS[0], BATCH_SIZE), 2)
    np.testing.assert_allclose(
        model.predict(data.global_batches(), verbose=0),
        model.predict(COLUMNS[0], verbose=0),
        rtol=1e-5,
    )


@installed("tensorflow")
def test_what_keras_reads_itself_is_given_as_it_is():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(COLUMNS).batch(BATCH_SIZE)
    assert distributed(dataset, 2).global_batches() is dataset
