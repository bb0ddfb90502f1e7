"""Values that were handed out stay as they are when a variable changes."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist

DEVICES = ["cpu:0", "cpu:1"]
# Rows enough for frameworks to share memory where they do.
SHAPE = (4, 1024)


@pytest.fixture(
    params=[
        lambda: keras_dist.OneDeviceStrategy("cpu:0"),
        lambda: keras_dist.MirroredStrategy(DEVICES),
        lambda: keras_dist.CentralStorageStrategy(DEVICES),
    ],
    ids=["one", "mirrored", "central"],
)
def make(request):
    return request.param


def replica():
    return keras_dist.get_replica_context()


def full(value):
    return ops.full(SHAPE, float(value))


def aligned_ones():
    """An array whose memory JAX can use as it is."""
    size = int(np.prod(SHAPE))
    memory = np.zeros(size * 4 + 64, "uint8")
    start = -memory.ctypes.data % 64
    rows = memory[start : start + size * 4].view("float32").reshape(SHAPE)
    rows[:] = 1.0
    return rows


HANDED_OUT = {
    "read_var": lambda s, v: s.extended.read_var(v),
    "value from run": lambda s, v: s.run(lambda: v.value),
    "rows of the value": lambda s, v: s.run(lambda: v.value[1:]),
    "the value reshaped": lambda s, v: s.run(lambda: ops.reshape(v, (-1,))),
    "what stops gradients": lambda s, v: s.run(
        lambda: ops.stop_gradient(v.value)
    ),
    "what assign returns": lambda s, v: s.run(lambda: v.assign(full(1))),
    "reduce": lambda s, v: s.reduce("MEAN", v, axis=None),
    "gather": lambda s, v: s.gather(v, axis=0),
    "reduce of a result": lambda s, v: s.reduce(
        "MEAN", s.run(lambda: v.value), axis=None
    ),
    "compiled": lambda s, v: s.run(keras_dist.function(lambda: v.value)),
    "compiled, the variable": lambda s, v: s.run(
        keras_dist.function(lambda: v)
    ),
    "compiled alone": lambda s, v: keras_dist.function(lambda: v.value)(),
    "compiled alone, the variable": lambda s, v: keras_dist.function(
        lambda: v
    )(),
    "update": lambda s, v: s.extended.update(v, lambda copy: copy.value),
    "update that assigns": lambda s, v: s.extended.update(
        v, lambda copy: copy.assign(full(1))
    ),
    "values from a function": lambda s, v: (
        s.experimental_distribute_values_from_function(lambda context: v.value)
    ),
    "merge_call": lambda s, v: s.run(
        lambda: replica().merge_call(lambda strategy: v.value)
    ),
    "all_reduce": lambda s, v: s.run(lambda: replica().all_reduce("MEAN", v)),
    "all_gather": lambda s, v: s.run(lambda: replica().all_gather(v, 0)),
    "reduce_to": lambda s, v: s.extended.reduce_to("MEAN", v, "cpu:0"),
    "reduce_to the variable": lambda s, v: s.extended.reduce_to("MEAN", v, v),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(v.value, v),
}


@pytest.mark.parametrize("name", HANDED_OUT)
def test_a_value_stays_when_the_variable_is_assigned_to(make, name):
    strategy = make()
    with strategy.scope():
        variable = keras.Variable(full(1))
    handed_out = HANDED_OUT[name](strategy, variable)
    variable.assign(full(5))
    for part in strategy.experimental_local_results(handed_out):
        assert not isinstance(part, keras.Variable)
        np.testing.assert_array_equal(ops.convert_to_numpy(part), 1.0)


def test_the_default_strategy_reads_a_value_that_stays():
    variable = keras.Variable(full(1))
    value = keras_dist.get_strategy().extended.read_var(variable)
    variable.assign(full(5))
    np.testing.assert_array_equal(ops.convert_to_numpy(value), 1.0)


def test_a_function_of_values_may_fill_one_array_again(make):
    strategy = make()
    buffer = np.zeros(SHAPE, "float32")

    def value_fn(context):
        buffer[:] = context.replica_id_in_sync_group
        return {"filled": buffer}

    values = strategy.experimental_distribute_values_from_function(value_fn)
    buffer[:] = 9.0
    parts = strategy.experimental_local_results(values)
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(part["filled"], index)


def test_a_generator_may_fill_one_array_again(make):
    strategy = make()

    def batches():
        buffer = np.zeros(SHAPE, "float32")
        for step in range(4):
            buffer[:] = step
            yield buffer

    dataset = strategy.distribute_datasets_from_function(lambda _: batches())
    seen = [
        float(ops.convert_to_numpy(part)[0, 0])
        for element in dataset
        for part in strategy.experimental_local_results(element)
    ]
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_a_generator_of_one_array_feeds_fit(make):
    strategy = make()

    def batches():
        x, y = np.zeros((2, 1), "float32"), np.zeros((2, 1), "float32")
        for step in range(2):
            x[:], y[:] = step, 0.0
            yield x, y

    dataset = strategy.distribute_datasets_from_function(lambda _: batches())
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(1, kernel_initializer="ones"),
            ]
        )
        model.compile(loss="mse")
    # Batches of 0 and of 1: a mean of 0.5, whoever computed which.
    steps = 2 // strategy.num_replicas_in_sync
    loss = model.evaluate(dataset, steps=steps, verbose=0)
    assert loss == pytest.approx(0.5)


def test_a_numpy_dataset_keeps_its_rows(make):
    strategy = make()
    rows = np.ones((4, 2), "float32")
    dataset = strategy.experimental_make_numpy_dataset(rows)
    rows[:] = 9.0
    assert [np.asarray(row).tolist() for row in dataset] == [[1.0, 1.0]] * 4


@pytest.mark.parametrize("kind", ["MirroredStrategy", "CentralStorageStrategy"])
def test_a_variable_keeps_its_value_when_an_array_is_filled(kind):
    # A variable on one device is plain Keras', which keeps the array on JAX.
    strategy = getattr(keras_dist, kind)(DEVICES)
    rows = aligned_ones()
    with strategy.scope():
        variable = keras.Variable(rows)
    rows[:] = 5.0
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), 1.0)
    variable.assign(rows)
    rows[:] = 9.0
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), 5.0)
