"""A compiled function costs as few traces and operations as a native one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist
from functions.helpers import Classifier
from functions.helpers import X
from functions.helpers import Y
from functions.helpers import batches
from functions.helpers import strategy_of


def traced(strategy, function):
    """What was compiled of a function that `run` was given."""
    (kept,) = strategy.executor.compiler._kept[function.key].values()
    return kept


def operations(concrete):
    """Number of operations of a graph, and of the functions it calls."""
    graph = concrete.graph.as_graph_def()
    library = graph.library.function
    return len(graph.node) + sum(len(each.node_def) for each in library)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_nothing_is_traced_after_each_shape_was_seen(num_replicas):
    classifier = Classifier(strategy_of(num_replicas))
    step = keras_dist.function(classifier.step)
    counts = []
    for _ in range(3):
        classifier.epoch(step)
        counts.append(
            traced(
                classifier.strategy, step
            )._function.experimental_get_tracing_count()
        )
    # For 8 rows twice, because that made the optimizer's variables; for 6.
    assert counts == [3, 3, 3]


def native_step(classifier):
    """The same step, written for the original, with its own gradients."""

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = classifier.model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            classifier.accuracy.update_state(y, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=8)
        variables = classifier.model.trainable_variables
        grads = tape.gradient(loss, [v.value for v in variables])
        classifier.optimizer.apply(grads, variables)
        return loss

    return step


def test_two_replicas_have_hardly_more_operations_than_native_ones():
    hidden = [lambda: keras.layers.Dense(8, activation="relu")]
    ours = Classifier(strategy_of(2), *hidden)
    step = keras_dist.function(ours.step)
    (batch,) = batches(ours.strategy, X[:8], Y[:8])
    ours.strategy.run(step, args=batch)
    concrete = traced(ours.strategy, step)._function
    concrete = concrete.get_concrete_function(batch, {})

    native = tf.distribute.MirroredStrategy(
        ["/cpu:0", "/cpu:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    theirs = Classifier(native, *hidden)
    replica_fn = tf.autograph.experimental.do_not_convert(native_step(theirs))

    @tf.function
    def native_run(x, y):
        return native.run(replica_fn, args=(x, y))

    data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(8)
    (args,) = native.experimental_distribute_dataset(data)
    native_run(*args)
    theirs_count = operations(native_run.get_concrete_function(*args))
    assert operations(concrete) <= 1.05 * theirs_count


def test_a_scan_has_as_many_operations_however_many_steps():
    counts = []
    for steps in (3, 30):
        classifier = Classifier(strategy_of(2))
        step = keras_dist.function(classifier.step)
        rows = np.repeat(X[:8], 4 * steps, axis=0)[: 8 * steps]
        labels = np.zeros(len(rows), "int32")
        data = iter(batches(classifier.strategy, rows, labels))
        keras_dist.scan_steps(step, data, steps)
        kept = traced(classifier.strategy, step)
        graphs = kept._function._list_all_concrete_functions()
        counts.append({operations(concrete) for concrete in graphs})
    assert counts[0] == counts[1]


def test_arrays_of_numpy_are_no_constants():
    strategy = strategy_of(2)
    v = []

    @keras_dist.function
    def step(x, y):
        v.append(1)
        return x + y

    for i in range(3):
        values = [np.full(2, each, "float32") for each in (i, -i)]
        values = keras_dist.PerReplica(values)
        result = strategy.run(step, (values, np.float32(i)))
        assert [x.numpy().tolist() for x in result.values] == [
            [2.0 * i] * 2,
            [0.0] * 2,
        ]
    assert len(v) == 2  # once a replica
