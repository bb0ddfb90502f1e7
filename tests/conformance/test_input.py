"""Distributed datasets and what is made of them."""

import keras
import numpy as np
import pytest

from conformance.contract import contract
from conformance.data import batched
from conformance.data import count
from conformance.data import distribute
from conformance.helpers import compiled
from conformance.helpers import local
from conformance.helpers import numbers
from conformance.helpers import tensor
from conformance.helpers import to_numpy

CPUS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@contract(161)
def test_a_global_batch_is_split_in_order(api, two):
    data = distribute(two, count(7), 4)
    expected = [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0]]]
    assert [numbers(batch) for batch in data] == expected


@contract(162, native=False)
@pytest.mark.parametrize("rows", range(10))
def test_shares_are_balanced(api, mirrored, rows):
    """The original fills replicas in order: 4 rows on 3 are 2, 2, 0."""
    (batch,) = mirrored.experimental_distribute_dataset([count(rows)])
    sizes = [len(part) for part in local(batch)]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert np.concatenate(local(batch)).tolist() == [*range(rows)]


@contract(162, native=False)
def test_where_shares_begin(api):
    def sizes(rows, replicas):
        strategy = api.MirroredStrategy(CPUS[:replicas])
        (batch,) = strategy.experimental_distribute_dataset([count(rows)])
        return [len(part) for part in local(batch)]

    assert sizes(4, 3) == [2, 1, 1]
    assert sizes(7, 2) == [4, 3]
    assert sizes(3, 4) == [1, 1, 1, 0]
    assert sizes(1, 4) == [1, 0, 0, 0]


@contract(163)
def test_a_partial_batch_is_delivered_or_dropped(api, strategy):
    def rows(**kwargs):
        data = distribute(strategy, count(11), 4, **kwargs)
        return sum(len(part) for batch in data for part in local(batch))

    assert rows() == 11
    assert rows(drop_remainder=True) == 8


@contract(164)
def test_static_batches_that_are_smaller_than_the_replicas(api, two):
    data = distribute(two, count(2), 1, drop_remainder=True)
    assert [numbers(batch)[0] for batch in data] == [[0.0], [1.0]]


@contract(165)
def test_a_replica_without_rows(api, two):
    columns = {"x": np.ones((3, 2, 5), "float32"), "y": (np.arange(3),)}
    *_, last = distribute(two, columns, 2)
    for leaf, shape in ((last["x"], (2, 5)), (last["y"][0], ())):
        first, second = local(leaf)
        assert first.shape == (1, *shape)
        assert second.shape == (0, *shape)
        assert second.dtype == first.dtype


@contract(166)
@pytest.mark.parametrize("wrap", [lambda fn: fn, compiled])
def test_results_equal_the_plain_dataset(api, two, wrap):
    square = wrap(lambda x: x * x)
    results = [
        numbers(two.run(square, args=(batch,)))
        for batch in distribute(two, count(9)[5:], 2)
    ]
    assert results == [[[25.0], [36.0]], [[49.0], [64.0]]]


@contract(167)
def test_each_iter_starts_again(api, strategy):
    data = distribute(strategy, count(6), 4)
    first, second = ([numbers(b) for b in data] for _ in range(2))
    assert first == second
    iterator = iter(data)
    next(iterator)
    assert numbers(next(iter(data))) == first[0]


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


@contract(168)
def test_the_end_of_data(api, two):
    with two.scope():
        total = keras.Variable(
            0.0,
            trainable=False,
            synchronization="on_read",
            aggregation="sum",
        )
    iterator = iter(distribute(two, count(9)[5:], 2))

    def add(x):
        total.assign_add(keras.ops.sum(x))

    with pytest.raises(StopIteration):
        while True:
            two.run(add, args=(next(iterator),))
    assert float(keras.ops.convert_to_numpy(total)) == 26.0


@contract(169)
def test_optionals(api, two):
    iterator = iter(distribute(two, count(4), 2))
    results, had = [], []
    for _ in range(3):
        optional = iterator.get_next_as_optional()
        had.append(bool(optional.has_value()))
        if had[-1]:
            value = optional.get_value()
            results.append(numbers(two.run(lambda x: x + 1, args=(value,))))
    assert had == [True, True, False]
    assert results == [[[1.0], [2.0]], [[3.0], [4.0]]]


@contract(170)
def test_next_in_a_replica_function(api, two):
    iterator = iter(distribute(two, count(4), 2))
    message = r"next\(iterator\) should be called from outside of replica_fn"
    with pytest.raises(ValueError, match=message):
        two.run(lambda: next(iterator))


@contract(171, native=False)
def test_the_spec(api, strategy):
    columns = (np.ones((4, 3), "float32"), count(4))
    for drop_remainder, size in ((False, None), (True, 4)):
        dataset = batched(columns, 4, drop_remainder)
        if strategy is api.get_strategy():
            continue
        data = strategy.experimental_distribute_dataset(dataset)
        replicas = strategy.num_replicas_in_sync
        rows = None if size is None or size % replicas else size // replicas
        for spec in (data.element_spec, iter(data).element_spec):
            for leaf, shape in zip(spec, ((3,), ()), strict=True):
                own = leaf.values if replicas > 1 else (leaf,)
                assert len(own) == replicas
                for part in own:
                    assert part.shape == (rows, *shape)
                    assert part.dtype == "float32"


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


@contract(173, native=False)
def test_loops_of_every_kind(api, two):
    seen = []
    for index, batch in enumerate(distribute(two, count(8), 2)):
        if index == 1:
            continue
        seen.append((index, numbers(batch)))
        if index == 2:
            break
    assert seen == [(0, [[0.0], [1.0]]), (2, [[4.0], [5.0]])]


@contract(174, native=False)
def test_a_dataset_that_is_not_batched(api, two):
    rows = two.experimental_make_numpy_dataset(count(4))
    with pytest.raises(ValueError, match="batch first"):
        next(iter(two.experimental_distribute_dataset(rows)))


@pytest.mark.runs_on("tensorflow")
@contract(174, native=False)
def test_tf_data_that_is_not_batched(api, two):
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(ValueError, match="batch first"):
        two.experimental_distribute_dataset(tf.data.Dataset.range(4))


@contract(175, native=False)
def test_data_that_is_no_dataset(api, strategy):
    batches = [count(4), count(3)]
    for data in (batches, (batch for batch in batches)):
        distributed = strategy.experimental_distribute_dataset(data)
        rows = [np.concatenate(local(batch)) for batch in distributed]
        assert [row.tolist() for row in rows] == [[0, 1, 2, 3], [0, 1, 2]]
    if strategy is not api.get_strategy():
        with pytest.raises(ValueError, match="batch first"):
            strategy.experimental_distribute_dataset(count(4))


@contract(176)
def test_elements_go_to_the_replicas_in_turn(api, strategy):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return batched(count(17)[5:], 1)

    data = strategy.distribute_datasets_from_function(dataset_fn)
    rows = [row for step in data for part in numbers(step) for row in part]
    assert rows == [*range(5, 17)]
    (context,) = contexts
    assert context.num_input_pipelines == 1
    assert context.input_pipeline_id == 0
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
    first = next(iter(data))
    if strategy.num_replicas_in_sync == 2:
        assert numbers(first) == [[5.0], [6.0]]


@contract(177)
def test_an_odd_number_of_elements(api, two):
    def steps(drop_remainder):
        return two.distribute_datasets_from_function(
            lambda _: batched(count(6), 2, drop_remainder)
        )

    full = [[0.0, 1.0], [2.0, 3.0]]
    assert [numbers(s) for s in steps(False)] == [full, [[4.0, 5.0], []]]
    assert [numbers(s) for s in steps(True)] == [full]


@contract(192)
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
