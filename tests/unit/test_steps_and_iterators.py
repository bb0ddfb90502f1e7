"""Older ways to run steps: iterators of functions, and several steps."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist

KINDS = {
    "mirrored": lambda: keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one": lambda: keras_dist.OneDeviceStrategy("cpu:0"),
    "central": lambda: keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "default": keras_dist.get_strategy,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_an_input_function_may_return_a_function(kind):
    strategy = KINDS[kind]()
    counter = itertools.count()

    def input_fn(context):
        def get_next():
            number = next(counter)
            if number == 4:
                raise StopIteration
            return np.full((1,), number, "float32")

        return get_next

    iterator = strategy.make_input_fn_iterator(input_fn)
    iterator.initialize()
    seen = []
    for _ in range(4 // strategy.num_replicas_in_sync):
        element = iterator.get_next()
        for part in strategy.experimental_local_results(element):
            seen.append(float(ops.convert_to_numpy(part)[0]))
    assert seen == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(keras_dist.OutOfRangeError):
        iterator.get_next()


@each_kind
def test_several_steps_on_an_iterator(kind):
    strategy = KINDS[kind]()
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False, aggregation="sum")
    iterator = strategy.make_dataset_iterator(
        [np.full((2,), float(i), "float32") for i in range(4)]
    )
    replicas = strategy.num_replicas_in_sync

    def step(context, rows):
        def replica_fn(rows):
            context.set_last_step_output("sum", ops.sum(rows), "SUM")
            context.set_last_step_output("own", ops.sum(rows))
            context.set_non_tensor_output("kind", "replica")
            return ops.sum(rows)

        each = strategy.run(replica_fn, args=(rows,))
        context.set_last_step_output("mean", each, reduce_op="MEAN")
        context.set_non_tensor_output("steps", "done")

    context = strategy.extended.experimental_run_steps_on_iterator(
        step, iterator, iterations=3, initial_loop_values={"before": 1.0}
    )
    outputs = context.last_step_outputs
    assert outputs["before"] == 1.0
    assert float(outputs["sum"]) == 4.0
    assert float(outputs["mean"]) == 4.0 / replicas
    own = strategy.experimental_local_results(outputs["own"])
    assert [float(x) for x in own] == [4.0 / replicas] * replicas
    assert context.non_tensor_outputs["steps"] == "done"
    assert set(context.non_tensor_outputs["kind"]) == {"replica"}
    assert float(total) == 0.0
    with pytest.raises(ValueError, match="iterations=0"):
        strategy.extended.experimental_run_steps_on_iterator(step, iterator, 0)
    with pytest.raises(keras_dist.OutOfRangeError):
        strategy.extended.experimental_run_steps_on_iterator(step, iterator, 2)


@pytest.mark.runs_on("tensorflow")
@each_kind
def test_a_dataset_of_arrays_is_shuffled_and_mapped(kind):
    pytest.importorskip("tensorflow", reason="`tf.data` does it")
    strategy = KINDS[kind]()
    rows = strategy.experimental_make_numpy_dataset(
        np.arange(8, dtype="float32")
    )
    shuffled = rows.repeat(2).shuffle(16, seed=1).map(lambda x: 10 * x)
    data = strategy.experimental_distribute_dataset(shuffled.batch(4))
    seen = [
        float(row)
        for element in data
        for part in strategy.experimental_local_results(element)
        for row in np.asarray(ops.convert_to_numpy(part))
    ]
    assert sorted(seen) == sorted([10.0 * i for i in range(8)] * 2)
    assert seen != sorted(seen)
    batched = rows.batch(4, drop_remainder=True).prefetch(1)
    assert [len(batch) for batch in batched] == [4, 4]


def test_a_dataset_of_arrays_without_tensorflow(monkeypatch):
    from keras_dist.internals import keras_data

    monkeypatch.setattr(keras_data, "tf_dataset_of_rows", lambda: None)
    rows = keras_dist.get_strategy().experimental_make_numpy_dataset([1.0])
    with pytest.raises(AttributeError, match="`shuffle`.*pip install"):
        rows.shuffle(2)
