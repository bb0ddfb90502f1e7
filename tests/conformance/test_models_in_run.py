"""What models, losses and metrics do in `run`, beside what they do in `fit`."""

import keras
import numpy as np

import keras_dist
from conformance.contract import contract
from conformance.helpers import compiles
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import tensor


@contract(215, native=False)
def test_the_first_call_may_have_other_rows_on_each_replica(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    x = per_replica(mirrored, lambda i: tensor(np.ones((i + 1, 2))))
    outputs = mirrored.run(lambda x: model(x), (x,))
    assert len(model.weights) == 4
    first = numbers(outputs)[0][0]
    for index, rows in enumerate(numbers(outputs)):
        np.testing.assert_allclose(rows, [first] * (index + 1), rtol=1e-6)


class Counting(keras.Model):
    """Counts the rows that it was trained on in a metric of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.rows = keras.metrics.Sum(name="rows")

    def call(self, x):
        return self.dense(x)


@contract(212, native=False)
def test_a_metric_goes_on_from_what_fit_made_of_it(mirrored):
    """Replicas forget what they had of a state that `fit` has changed."""
    count = mirrored.num_replicas_in_sync
    with mirrored.scope():
        model = Counting()
        model.compile("sgd", "mse")
    x = np.ones((5, 2), "float32")
    model.fit(x, x[:, :1], verbose=0)

    def add(rows):
        mirrored.run(lambda: model.rows.update_state(tensor(rows)))
        return float(keras.ops.convert_to_numpy(model.rows.result()))

    assert add(1.0) == count
    model.fit(x, x[:, :1], verbose=0)  # resets the metrics of the model
    assert add(1.0) == count
    model.rows.reset_state()
    assert add(2.0) == 2 * count


@contract(212, native=False)
def test_replicas_add_to_what_fit_has_counted(mirrored):
    with mirrored.scope():
        metric = keras.metrics.MeanAbsoluteError()
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric])

    def add():
        mirrored.run(lambda: metric.update_state([[0.0]], [[1.0]]))
        return float(keras.ops.convert_to_numpy(metric.count))

    count = mirrored.num_replicas_in_sync
    x = np.ones((5, 2), "float32")
    assert add() == count
    for _ in range(2):
        model.fit(x, x[:, :1], verbose=0)
        assert add() == 5 + count


@contract(130, native=False)
def test_what_is_assigned_outside_replaces_what_replicas_had(mirrored):
    count = mirrored.num_replicas_in_sync
    with mirrored.scope():
        v = keras.Variable(0.0, aggregation="sum", synchronization="on_read")

    def own():
        context = keras_dist.get_replica_context()
        return v.assign_add(float(context.replica_id_in_sync_group))

    mirrored.run(own)
    v.assign(float(4 * count))
    assert numbers(mirrored.run(lambda: v.assign_add(0.0))) == [4.0] * count


@compiles
@contract(216, native=False)
def test_a_compiled_function_in_the_step_changes_no_number(two):
    def trained(compiled):
        with two.scope():
            v = keras.Variable([1.0, 2.0])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

        def loss_of(x):
            return keras.ops.sum((v - x) ** 2)

        if compiled:
            loss_of = keras_dist.function(loss_of)

        def step(x):
            loss, (grad,) = keras_dist.value_and_grad(lambda: loss_of(x), [v])
            optimizer.apply([grad], [v])
            return loss

        if compiled:
            step = keras_dist.function(step)
        x = per_replica(two, lambda i: tensor([1.0 + i, 3.0 - i]))
        losses = [numbers(two.run(step, (x,))) for _ in range(3)]
        return losses, keras.ops.convert_to_numpy(v)

    for compiled, plain in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-6)
