"""What is left of `tf.distribute`'s first interface does what it did."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from conformance.contract import contract
from errors.helpers import KINDS
from errors.helpers import each_kind


def _rows(strategy, value):
    parts = strategy.unwrap(value)
    return [float(row) for each in parts for row in ops.convert_to_numpy(each)]


@contract(194, native=False)
@each_kind
def test_an_iterator_starts_again(kind):
    strategy = KINDS[kind]()
    batches = [np.arange(4.0), np.arange(4.0, 6.0)]
    iterator = strategy.make_dataset_iterator(batches)
    assert iterator.initialize() == []
    assert _rows(strategy, iterator.get_next()) == [0.0, 1.0, 2.0, 3.0]
    assert iterator.initializer == []
    with pytest.warns(DeprecationWarning, match="`run`"):
        result = strategy.experimental_run(lambda rows: rows * 2, iterator)
    assert _rows(strategy, result) == [0.0, 2.0, 4.0, 6.0]
    assert _rows(strategy, iterator.get_next()) == [4.0, 5.0]
    with pytest.raises(keras_dist.OutOfRangeError, match="initialize"):
        iterator.get_next()
    with pytest.warns(DeprecationWarning, match="`run`"):
        assert strategy.experimental_run(lambda: None) is None


@each_kind
def test_what_sessions_needed_is_accepted_and_other_modes_are_not(kind):
    strategy, config = KINDS[kind](), {"threads": 1}
    copied = strategy.update_config_proto(config)
    assert copied == config
    assert copied is not config
    assert strategy.configure(session_config=config) is None
    assert strategy.group([1.0]) is None
    mode = keras_dist.InputReplicationMode.PER_REPLICA
    with pytest.raises(ValueError, match="(?s)not supported.*PER_REPLICA"):
        strategy.make_input_fn_iterator(lambda _: [], mode)


def test_both_generations_are_strategies():
    v1 = keras_dist.compat.v1
    old = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    assert isinstance(old, v1.Strategy)
    assert isinstance(old, keras_dist.Strategy)
    assert repr(old) == "<MirroredStrategy on cpu:0, cpu:1>"
    assert v1.get_loss_reduction() is keras_dist.ReduceOp.SUM


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
        seen += _rows(strategy, iterator.get_next())
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
    seen = [row for element in data for row in _rows(strategy, element)]
    assert sorted(seen) == sorted([10.0 * i for i in range(8)] * 2)
    assert seen != sorted(seen)
    batched = rows.batch(4, drop_remainder=True).prefetch(1)
    assert [len(batch) for batch in batched] == [4, 4]


def test_a_dataset_of_arrays_without_tensorflow(monkeypatch):
    from keras_dist.internals import keras_data

    monkeypatch.setattr(keras_data, "tf_dataset_of_rows", lambda: None)
    rows = keras_dist.get_strategy().experimental_make_numpy_dataset([1.0])
    with pytest.raises(AttributeError, match="(?s)`shuffle`.*pip install"):
        rows.shuffle(2)
