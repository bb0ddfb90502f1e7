"""Central storage keeps one copy of each variable, and a step costs no more."""

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
from backends.classifier import classifier
from backends.classifier import rows
from keras_dist_tensorflow.central import OneCopyStorage
from parity.harness import central
from parity.harness import strategy as mirrored

X, Y = rows(44)


def make_model(*layers, **options):
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, activation="relu")
    return classifier(hidden, *layers, **options)


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


@pytest.mark.parametrize("num_replicas", [1, 3])
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
        found = operations(graph_of(model, X[:8], Y[:8]))
        kinds = collections.Counter(op.type for op in found)
        roots = {device_of(op) for op in found if op.type == "Sqrt"}
        assert roots <= {"cpu:3"}
        return {
            kind: count
            for kind, count in kinds.items()
            if kind == "Sqrt" or kind.startswith(("Assign", "ResourceApply"))
        }

    assert updates(2) == updates(4)


def test_a_step_costs_no_more_than_with_copies(calls_a_step):
    for num_replicas in (2, 4):
        counts, calls = [], []
        for make in (central, mirrored):
            with make(num_replicas).scope():
                model = make_model()
            model.train_on_batch(X[:8], Y[:8])
            counts.append(len(operations(graph_of(model, X[:8], Y[:8]))))
            calls.append(calls_a_step(model, X, Y) if num_replicas == 2 else 0)
        assert counts[0] <= counts[1]
        assert calls[0] <= calls[1]


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
