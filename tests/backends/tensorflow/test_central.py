"""One copy of each variable: where it is, and what a step costs."""

import collections
import gc
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from step_graphs import graph_of

import keras_dist
from keras_dist_tensorflow.central import OneCopyStorage
from parity.harness import central
from parity.harness import strategy as mirrored

RNG = np.random.default_rng(0)
X = RNG.normal(size=(44, 6)).astype("float32")
Y = RNG.integers(0, 3, 44)


def make_model(*layers, optimizer="adam", **compile_kwargs):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            *layers,
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer, loss, **{"metrics": ["accuracy"], **compile_kwargs}
    )
    return model


def all_variables(model):
    return model.weights + model.optimizer.variables + model.metrics_variables


def device_of(tensor):
    return tensor.device.rsplit("/", 1)[-1].removeprefix("device:").lower()


def operations(graph):
    """A graph's operations, those of the functions in it included."""
    own = list(graph.get_operations())
    for function in graph._functions.values():
        own += function.graph.get_operations()
    return own


def native_variables_alive():
    gc.collect()
    return [
        v
        for v in gc.get_objects()
        if isinstance(v, tf.Variable) and not hasattr(v, "_values")
    ]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_the_parameter_device_has_each_variable_once(num_replicas):
    before = {id(v) for v in native_variables_alive()}
    strategy = central(num_replicas)
    with strategy.scope():
        model = make_model(keras.layers.BatchNormalization())
    model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y))
    model.predict(X, batch_size=8, verbose=0)
    for variable in all_variables(model):
        assert strategy.devices_of(variable) == ("cpu:3",)
        assert device_of(variable.value) == "cpu:3"
    # No hidden ones either: copies of replicas, or caches.
    made = [v for v in native_variables_alive() if id(v) not in before]
    apart = {v.name for v in made if device_of(v) != "cpu:3"}
    assert not {name for name in apart if "seed" not in name}
    shapes = collections.Counter(
        tuple(v.shape) for v in made if v.shape.rank > 1
    )
    assert shapes == {(6, 8): 3, (8, 3): 3}  # a kernel, two slots


def test_slots_go_with_their_variables_on_several_devices():
    strategy = keras_dist.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]
    )
    with strategy.scope():
        model = make_model()
    model.fit(X, Y, batch_size=8, verbose=0)
    where = {v.path: strategy.devices_of(v) for v in all_variables(model)}
    assert set(where.values()) == {("cpu:2",), ("cpu:3",)}
    for weight in model.weights:
        name = weight.path.replace("/", "_")
        slots = [path for path in where if name in path]
        assert len(slots) == 2
        assert {where[path] for path in slots} == {where[weight.path]}


def test_adopted_models_move():
    plain = make_model()
    plain.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    model = make_model()
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    strategy = central(2)
    strategy.distribute(model)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for variable in all_variables(model):
        assert strategy.devices_of(variable) == ("cpu:3",)
    for own, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)


def test_each_replica_computes_on_its_device():
    strategy = central(3)
    with strategy.scope():
        model = make_model()
        assert device_of(ops.ones(())) == "cpu:0"
    model.train_on_batch(X[:9], Y[:9])
    graph = graph_of(model, X[:9], Y[:9])
    devices = collections.Counter(
        device_of(op) for op in operations(graph) if op.type == "MatMul"
    )
    # Two forward; backward two kernels and the first layer's outputs.
    assert devices == {"cpu:0": 5, "cpu:1": 5, "cpu:2": 5}
    outputs = strategy.run(lambda: model(X[:4])).values
    assert [device_of(each) for each in outputs] == ["cpu:0", "cpu:1", "cpu:2"]


def test_one_replica_computes_apart_from_its_variables():
    strategy = keras_dist.CentralStorageStrategy(["cpu:1"], "cpu:3")
    with strategy.scope():
        model = make_model()
    model.train_on_batch(X[:8], Y[:8])
    found = [
        op
        for op in operations(graph_of(model, X[:8], Y[:8]))
        if op.type == "MatMul"
    ]
    assert {device_of(op) for op in found} == {"cpu:1"}
    owners = {strategy.devices_of(v) for v in all_variables(model)}
    assert owners == {("cpu:3",)}
    result = strategy.run(lambda: ops.ones((2,)) + 1)
    assert device_of(strategy.experimental_local_results(result)[0]) == "cpu:1"


def test_the_update_runs_once_where_the_variables_are():
    def updates(num_replicas):
        with central(num_replicas).scope():
            model = make_model()
        model.train_on_batch(X[:8], Y[:8])
        written = [
            op
            for op in operations(graph_of(model, X[:8], Y[:8]))
            if op.type.startswith(("Assign", "ResourceApply"))
        ]
        roots = [
            op
            for op in operations(graph_of(model, X[:8], Y[:8]))
            if op.type == "Sqrt"
        ]
        assert {device_of(op) for op in roots} <= {"cpu:3"}
        return collections.Counter(op.type for op in written), len(roots)

    assert updates(2) == updates(4)


def test_a_step_has_no_more_operations_than_with_copies():
    def count(strategy):
        with strategy.scope():
            model = make_model()
        model.train_on_batch(X[:8], Y[:8])
        return len(operations(graph_of(model, X[:8], Y[:8])))

    for num_replicas in (2, 4):
        own, copies = (
            count(central(num_replicas)),
            count(mirrored(num_replicas)),
        )
        assert own <= copies


def test_a_step_has_no_more_python_calls_than_with_copies(calls_a_step):
    def calls(strategy):
        with strategy.scope():
            model = make_model()
        return calls_a_step(model, X, Y)

    assert calls(central(2)) <= calls(mirrored(2))


def test_a_graph_needs_no_threads_once_it_is_traced():
    with central(3).scope():
        model = make_model()
    before = threading.active_count()
    model.fit(X, Y, batch_size=8, verbose=0)
    gc.collect()
    assert threading.active_count() == before


def test_each_tape_sees_its_own_replica_only():
    strategy = central(2)
    with strategy.scope():
        v = keras.Variable(3.0)

    def replica_fn():
        with tf.GradientTape() as own:
            y = v * v
        return own.gradient(y, v)

    with tf.GradientTape() as outer:
        gradients = strategy.run(replica_fn)
        total = strategy.reduce("SUM", gradients, axis=None)
    assert float(total) == 12.0
    # As in native strategies: no part of it, rather than one replica's.
    assert outer.gradient(total, v.value) is None


def weight_of(x):
    return keras.Variable(x, aggregation="none")


@pytest.mark.parametrize("traced", [False, True])
def test_a_written_variable_is_differentiated_as_written(traced):
    strategy = central(2)
    with strategy.scope():
        v = weight_of([2.0, 3.0])
        table = weight_of([[1.0], [2.0]])

    def replica_fn():
        v.assign(v * 10.0)
        with tf.GradientTape() as tape:
            before = ops.sum(v * v)
            v.assign(v + 1.0)
            table.assign(table * 2.0)
            rows = ops.take(table, [1, 1], axis=0)
            y = before + 3 * ops.sum(v) + ops.sum(rows**2)
        return tape.gradient(y, [v, table])

    def step():
        return strategy.run(replica_fn)

    of_v, of_table = (tf.function(step) if traced else step)()
    for gradient in of_v.values:
        np.testing.assert_allclose(gradient, [3.0, 3.0])
    for gradient in of_table.values:
        dense = tf.convert_to_tensor(gradient)
        np.testing.assert_allclose(dense, [[0.0], [16.0]])
    np.testing.assert_allclose(v, [21.0, 31.0])
    np.testing.assert_allclose(table, [[2.0], [4.0]])
    assert strategy.devices_of(v) == ("cpu:3",)


@pytest.mark.parametrize("traced", [False, True])
def test_a_failure_leaves_what_replicas_wrote_undone(traced):
    strategy = central(2)
    with strategy.scope():
        v = weight_of([2.0])

    def replica_fn():
        v.assign([5.0])
        index = keras_dist.get_replica_context().replica_id_in_sync_group
        if index == 1:
            raise ValueError("broken")

    def step():
        strategy.run(replica_fn)

    with pytest.raises(ValueError, match="broken") as error:
        (tf.function(step) if traced else step)()
    if not traced:
        assert "(on replica 1 of 2, keras_dist)" in error.value.__notes__
    assert float(v[0]) == 2.0
    strategy.run(lambda: v.assign([7.0]))
    assert float(v[0]) == 7.0


def test_an_on_read_variable_keeps_its_components_where_variables_are():
    strategy = central(2)
    with strategy.scope():
        counter = keras.Variable(
            0.0, aggregation="sum", synchronization="on_read"
        )
    before = {id(v) for v in native_variables_alive()}
    strategy.run(lambda: counter.assign_add(2.0))
    assert float(counter) == 4.0
    made = [v for v in native_variables_alive() if id(v) not in before]
    assert {device_of(v) for v in made} == {"cpu:3"}


def test_summaries_are_written_once(tmp_path):
    class Seen(keras.layers.Layer):
        def call(self, x):
            tf.summary.scalar("seen", tf.reduce_mean(x), step=0)
            return x

    with central(2).scope():
        model = make_model(Seen())
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        model.train_on_batch(X[:8], Y[:8])
        writer.flush()
    (path,) = tmp_path.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(path))
    tags = [value.tag for event in events for value in event.summary.value]
    (tag,) = tags
    assert tag.endswith("seen")


def test_spectral_normalization_trains_as_on_one_device():
    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.SpectralNormalization(keras.layers.Dense(4)),
                    keras.layers.Dense(1),
                ]
            )
            model.compile("sgd", "mse")
        model.fit(X, X[:, :1], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    with_copies, own = train(mirrored(2)), train(central(2))
    for one, other in zip(own, with_copies, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_train_step_that_fails_leaves_the_model_usable():
    with central(2).scope():
        model = make_model()
    model.fit(X, Y, batch_size=8, verbose=0)
    before = [v.numpy() for v in model.weights + model.optimizer.variables]
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(X[:, :3], Y, batch_size=8, verbose=0)
    after = [v.numpy() for v in model.weights + model.optimizer.variables]
    for own, expected in zip(after, before, strict=True):
        np.testing.assert_array_equal(own, expected)
    model.fit(X, Y, batch_size=8, verbose=0)


def test_sharded_optimizer_state_is_refused_by_name():
    with pytest.raises(ValueError, match="'tensorflow' keeps a copy.*'jax'"):
        keras_dist.MirroredStrategy(
            ["cpu:0", "cpu:1"], optimizer_state="sharded"
        )


def test_bytes_of_a_variable_that_has_not_moved_yet(monkeypatch):
    strategy = central(2)
    with strategy.scope():
        counted = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum"
        )
    strategy.run(lambda: counted.assign_add(1.0))
    executor = strategy.executor
    here, owner = strategy.plan.devices[0], executor.parameter_device(counted)
    assert executor.storage(counted).bytes_kept() == {owner: 3 * 4}
    monkeypatch.setattr(OneCopyStorage, "devices", (here,))
    assert executor.storage(counted).bytes_kept() == {here: 4, owner: 2 * 4}
