"""A user's own code computes on workers what it does on one device."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import set_initial_weights
from parity.harness import state_of
from parity.test_own_code import Logs
from parity.test_own_code import Numbers
from parity.test_own_code import Table
from workers.clusters import on_workers

pytestmark = pytest.mark.runs_on("jax", "tensorflow", "torch")


class Keeps(layers.Layer):
    """Adds a sum, and keeps a count, a moving average and a number of calls."""

    def build(self, shape):
        made = [
            self.add_weight(
                shape=(),
                initializer="zeros",
                trainable=False,
                aggregation=aggregation,
            )
            for aggregation in ("sum", "mean", "none", "only_first_replica")
        ]
        self.count, self.average, self.calls, self.first = made

    def call(self, x):
        self.count.assign_add(ops.sum(ops.cast(x[:, 0] > 0, "float32")))
        self.average.assign(0.5 * self.average + 0.5 * ops.mean(x))
        self.calls.assign_add(1.0)
        self.first.assign(ops.max(x[:1]))
        rows = ops.sum(ops.square(x), axis=-1)
        self.add_loss(0.1 * keras_dist.sum_over_rows(rows))
        return x


class WithTwoOptimizers(keras.Model):
    """Has one for a number beside the layers, which the loss calls."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.number = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="number"
        )
        self.of_number = keras.optimizers.SGD(0.1)
        self.of_number.build([self.number])

    def compute_loss(self, *args, training=True, **kwargs):
        loss = super().compute_loss(*args, training=training, **kwargs)
        if training:
            gradient = ops.convert_to_tensor(0.5)
            self.of_number.apply([gradient], [self.number])
        return loss


class Disagrees(Keeps):
    def call(self, x):
        self.calls.assign_add(ops.max(x))
        return x


def _data(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def _model(layer, cls=keras.Model, loss="mse", run_eagerly=False):
    inputs = keras.Input((4,))
    model = cls(inputs, layers.Dense(1)(layer(inputs)))
    set_initial_weights(model)
    for variable in model.non_trainable_variables:
        variable.assign(ops.zeros(variable.shape, variable.dtype))
    model.compile("sgd", loss, run_eagerly=run_eagerly)
    return model


def kept():
    model = _model(Keeps())
    # 17 rows: the last batch has one, and a worker has none.
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(*_data(17), **options).history
    return flat("history", history) | state_of(model)


def numbers():
    eagerly = BACKEND == "tensorflow"  # The others are tried in graphs.
    model = _model(layers.Activation("tanh"), Numbers, None, eagerly)
    logs = model.evaluate(*_data(22), batch_size=8, verbose=0, return_dict=True)
    return flat("evaluate", logs)


def two_optimizers():
    model = _model(layers.Activation("tanh"), WithTwoOptimizers)
    model.fit(*_data(20), batch_size=8, shuffle=False, verbose=0)
    return state_of(model)


def table():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Table()(inputs))
    set_initial_weights(model)
    return flat("predict", model.predict(_data(24)[0], batch_size=8, verbose=0))


SAME = {"kept": kept, "table": table}
if BACKEND != "jax":  # where a `test_step` has other arguments
    SAME["numbers"] = numbers
    SAME["two_optimizers"] = two_optimizers


@pytest.mark.parametrize("name", SAME)
@on_workers()
def test_same_numbers_on_every_worker(name):
    with keras_dist.MultiWorkerMirroredStrategy().scope():
        found = SAME[name]()
    with keras_dist.OneDeviceStrategy("cpu:0").scope():
        assert_same(found, SAME[name]())


@pytest.mark.skipif(BACKEND == "jax", reason="A step has all rows at once.")
@on_workers()
def test_what_workers_disagree_on_is_refused_on_all():
    with keras_dist.MultiWorkerMirroredStrategy().scope():
        # A variable to which workers assign different values.
        model = _model(Disagrees())
        with pytest.raises(keras_dist.ReplicaDivergenceError, match="differ"):
            model.fit(*_data(16), batch_size=8, verbose=0)
        # An integer in logs that differs between workers.
        model = _model(layers.Activation("tanh"), Logs, None)
        model.made = lambda x, y: ops.sum(ops.cast(x > 0, "int32"))
        with pytest.raises(keras_dist.ReplicaDivergenceError, match="differ"):
            model.evaluate(*_data(16), batch_size=8, verbose=0)
