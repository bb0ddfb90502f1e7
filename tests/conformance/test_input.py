"""Distributed datasets give each replica its rows of each batch, in order."""

import keras
import numpy as np
import pytest

from conformance.contract import contract
from conformance.data import batched
from conformance.data import count
from conformance.data import distribute
from conformance.helpers import local
from conformance.helpers import numbers
from conformance.helpers import tensor
from conformance.helpers import to_numpy


@contract(162, native=False)
@pytest.mark.parametrize("rows", range(10))
def test_shares_are_balanced(api, mirrored, rows):
    """The original has 2, 2, 0 of 4 rows on 3."""
    (batch,) = mirrored.experimental_distribute_dataset([count(rows)])
    sizes = [len(part) for part in local(batch)]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    begin = {(4, 3): [2, 1, 1], (7, 2): [4, 3], (3, 4): [1, 1, 1, 0]}
    assert sizes == begin.get((rows, len(sizes)), sizes)
    assert np.concatenate(local(batch)).tolist() == [*range(rows)]


@contract(164)
def test_static_batches_that_are_smaller_than_the_replicas(api, two):
    data = distribute(two, count(2), 1, drop_remainder=True)
    assert [numbers(batch)[0] for batch in data] == [[0.0], [1.0]]


@pytest.mark.runs_on("tensorflow")
@contract(167)
def test_shuffled_and_cached(api, two):
    tf = pytest.importorskip("tensorflow")
    rows = tf.data.Dataset.range(32).shuffle(32, seed=1)

    def passes(dataset):
        data = two.experimental_distribute_dataset(dataset)
        return [numbers(next(iter(data))) for _ in range(2)]

    first, second = passes(rows.batch(32))
    assert first != second
    first, second = passes(rows.batch(32).cache())
    assert first == second


@contract(172)
def test_what_a_distributed_dataset_has(api, two):
    data = distribute(two, count(8), 4)
    for name in ("map", "batch"):
        assert not hasattr(data, name)
    with pytest.raises(TypeError):
        len(data)
    assert int(data.cardinality) == 2

    def add(state, batch):
        return state + two.reduce("SUM", batch, axis=0)

    assert float(data.reduce(tensor(0.0), add)) == 28.0


@contract(166, 192)
def test_shapes_are_those_of_each_replicas_rows(api, two):
    (batch,) = distribute(two, count(8)[5:], 4)

    def fn(x):
        rows = keras.ops.shape(x)[0]
        return keras.ops.mean(x), tensor(rows, "int32")

    means, sizes = two.run(fn, args=(batch,))
    assert numbers(means) == [5.5, 7.0]
    assert numbers(sizes) == [2, 1]


@contract(193)
def test_a_mean_over_replicas_of_squares(api, strategy):
    with strategy.scope():
        variable = keras.Variable(1.0)
    replicas = strategy.num_replicas_in_sync
    data = strategy.distribute_datasets_from_function(
        lambda _: batched(count(2 + replicas)[2:], 1)
    )
    (batch,) = data
    results = strategy.run(
        lambda x: keras.ops.mean(x * x) + variable, args=(batch,)
    )
    mean = to_numpy(strategy.reduce("MEAN", results, axis=None))
    squares = np.square(np.arange(2.0, 2 + replicas))
    np.testing.assert_allclose(mean, np.mean(squares) + 1)


@contract(195, native=False)
def test_a_dataset_of_arrays(api, strategy):
    rows = strategy.experimental_make_numpy_dataset(np.ones(10, "float32"))
    assert rows.reduce(0.0, lambda a, b: float(a + b)) == 10.0
    pair = strategy.experimental_make_numpy_dataset((count(2), {"y": count(2)}))
    assert [(float(x), float(y["y"])) for x, y in pair] == [(0, 0), (1, 1)]
