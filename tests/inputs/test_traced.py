"""A `tf.function` reads a distributed dataset by `reduce`, on TensorFlow."""

import pytest

from inputs.helpers import BACKEND
from inputs.helpers import distributed
from inputs.helpers import from_function
from inputs.workers import on_all
from inputs.workers import strategies_of
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.dataset import distribute_from_function

if BACKEND != "tensorflow":
    pytest.skip("Only TensorFlow has its graphs.", allow_module_level=True)

import tensorflow as tf

pytestmark = pytest.mark.runs_on("tensorflow")


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("drop_remainder", [True, False])
def test_reduce(num_replicas, drop_remainder):
    rows = tf.data.Dataset.range(10).map(lambda x: (x, tf.cast(x, tf.float32)))
    data = distributed(rows.batch(4, drop_remainder), num_replicas)
    traces = []

    @tf.function
    def total():
        def add(state, batch):
            traces.append(None)
            count, sums = state
            x, y = batch
            for part in x.values if num_replicas > 1 else [x]:
                count += tf.shape(part)[0]
            for part in y.values if num_replicas > 1 else [y]:
                sums += tf.reduce_sum(part)
            return count, sums

        return data.reduce((0, 0.0), add)

    expected = (8, 28.0) if drop_remainder else (10, 45.0)
    for _ in range(2):
        assert tuple(part.numpy() for part in total()) == expected
    assert len(traces) == 1


def test_parts_are_in_order():
    data = distributed(tf.data.Dataset.range(7).batch(7), 3)

    @tf.function
    def sizes():
        return data.reduce(
            tf.zeros((3,), tf.int64),
            lambda _, batch: tf.stack([x[0] for x in batch.values]),
        )

    assert sizes().numpy().tolist() == [0, 3, 5]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_worker_has_its_own_rows(num_replicas):
    rows = tf.data.Dataset.range(7).batch(4)

    @tf.function
    def total(data):
        def add(sums, batch):
            return sums + sum(
                tf.reduce_sum(part)
                for part in (batch.values if num_replicas > 1 else [batch])
            )

        return data.reduce(tf.constant(0, tf.int64), add)

    for strategy, expected in zip(
        strategies_of(2, num_replicas),
        (0 + 1 + 4 + 5, 2 + 3 + 6),
        strict=True,
    ):
        assert total(distribute_dataset(strategy, rows)).numpy() == expected


def test_data_that_workers_read_differently():
    rows = tf.data.Dataset.range(4).batch(2)

    def refused(strategy):
        data = distribute_from_function(strategy, lambda _: rows)
        message = "all workers read the same batches. Received: .* `AgreedFeed`"
        with pytest.raises(NotImplementedError, match=f"(?s){message}"):
            tf.function(lambda: data.reduce(0, None))()

    on_all(strategies_of(2), refused)


def test_data_that_a_graph_can_not_read():
    message = (
        "`experimental_distribute_dataset` made it from a `tf.data.Dataset`"
    )
    rows = tf.data.Dataset.range(4).batch(2)
    for data in (
        distributed([rows], 2),
        from_function(lambda _: rows, 2),
    ):
        with pytest.raises(NotImplementedError, match=f"(?s){message}"):
            tf.function(lambda data=data: data.reduce(0, None))()
