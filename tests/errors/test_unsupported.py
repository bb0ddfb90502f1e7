"""What several replicas can't compute right is refused by name."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import central
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of
from parity.harness import to_numpy

FIT = {"shuffle": False, "verbose": 0}

# JAX runs one program on the global batch, which sees all the rows.
SEES_ALL_ROWS = BACKEND == "jax" or PLAIN_ONLY


class Largest(layers.Layer):
    """Keeps the largest entry, of which replicas see their part."""

    def build(self, input_shape):
        dtype = "int32" if isinstance(self, IntegerLargest) else "float32"
        options = {"initializer": "zeros", "trainable": False, "dtype": dtype}
        self.largest = self.add_weight((), name="largest", **options)

    def call(self, x):
        self.largest.assign(ops.max(x))
        return x


class IntegerLargest(Largest):
    def call(self, x):
        self.largest.assign(ops.cast(1000 * ops.max(x), "int32"))
        return x


def _keeping(num_replicas, layer, **options):
    with scope(num_replicas):
        model = models.sequence(layer, models.dense())()
        set_initial_weights(model)
        model.compile("sgd", "mse", jit_compile=JIT, **options)
    return model


@pytest.mark.runs_on("jax", "tensorflow", "torch")
@pytest.mark.parametrize(
    "eager", [False, True] if BACKEND == "tensorflow" else [False]
)
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("layer", [Largest, IntegerLargest])
def test_a_state_that_differs(layer, num_replicas, eager):
    model = _keeping(num_replicas, layer, run_eagerly=eager)
    data = models.table(7)
    state = model.layers[0].non_trainable_variables[-1]
    if SEES_ALL_ROWS:
        model.fit(**data, batch_size=7, **FIT)
        largest = data["x"].max()
        if layer is IntegerLargest:
            largest = int(1000 * largest)
        np.testing.assert_allclose(to_numpy(state), largest, rtol=1e-6)
        return
    before = state_of(model)
    with pytest.raises(
        keras_dist.ReplicaDivergenceError,
        match=f"(?s){state.name}.*dtype {state.dtype}.*aggregation='mean'",
    ):
        model.fit(**data, batch_size=7, **FIT)
    assert_same(state_of(model), before, rtol=0, atol=0)


def test_recurrent_layers_that_keep_a_state_for_each_row():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, 4, 3)).astype("float32")
    y = rng.normal(size=(12, 1)).astype("float32")

    def outcome(count):
        keras.utils.set_random_seed(5)
        with scope(count):
            model = keras.Sequential(
                [
                    keras.Input(batch_shape=(6, 4, 3)),
                    layers.SimpleRNN(2, stateful=True, name="recurrent"),
                    layers.Dense(1),
                ]
            )
            set_initial_weights(model)
            model.compile("sgd", "mse", jit_compile=JIT)
        history = model.fit(x, y, batch_size=6, **FIT).history
        return flat("history", history) | state_of(model)

    if SEES_ALL_ROWS:
        assert_same(outcome(3), outcome(None))
        return
    with pytest.raises(
        keras_dist.UnsupportedModelError, match="'recurrent' has stateful=True"
    ):
        outcome(3)


def _own_functions(name):
    """A class with one of those methods that Keras makes its steps with."""
    method = f"make_{name}_function"

    class OwnFunctions(keras.Sequential):
        calls = 0

        def count(self, force=False):
            self.calls += 1
            return getattr(super(), method)(force)

    setattr(OwnFunctions, method, OwnFunctions.count)
    return OwnFunctions


@pytest.mark.parametrize("name", ["train", "test", "predict"])
def test_steps_made_by_the_user(name):
    """Called, or on JAX, where a strategy makes them, refused."""
    data, cls = models.table(14), _own_functions(name)

    def outcome(count):
        with scope(count):
            model = cls([keras.Input((4,)), layers.Dense(1)])
            set_initial_weights(model).compile("sgd", "mse", jit_compile=JIT)
        model.fit(**data, batch_size=7, **FIT)
        logs = model.evaluate(**data, batch_size=7, verbose=0)
        predicted = model.predict(data["x"], batch_size=7, verbose=0)
        assert model.calls
        return flat("found", [logs, predicted]) | state_of(model)

    if BACKEND == "jax" and not PLAIN_ONLY:
        with pytest.raises(
            keras_dist.UnsupportedModelError, match="OwnFunctions overrides"
        ):
            outcome(2)
        return
    assert_same(outcome(2), outcome(None))


def _float8(num_replicas, make=None):
    with scope(num_replicas, make):
        model = models.sequence(models.dense(4), models.dense())()
        set_initial_weights(model)
        model.layers[0].quantize("float8")
        model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=JIT)
    return model


@pytest.mark.parametrize("make", [None, central])
def test_float8_takes_the_largest_of_all_rows(make):
    data = models.table(15)
    # The largest is not in the first replica's rows.
    data["x"][9] *= 20
    options = {**FIT, "batch_size": 15, "epochs": 4}
    model = _float8(2, make)
    if not SEES_ALL_ROWS:
        with pytest.raises(
            keras_dist.UnsupportedModelError,
            match=r"(?s)_scale' is overwritten with its gradient.*one device",
        ):
            model.fit(**data, **options)
        model = _float8(1)
    model.fit(**data, **options)
    plain = _float8(None)
    plain.fit(**data, **options)
    assert_same(state_of(model), state_of(plain))


def test_float8_in_a_replica_function():
    model = _float8(2)
    strategy, variables = (
        model.weights[0].distribute_strategy,
        model.trainable_variables,
    )

    # Keras' float8 takes a graph on TensorFlow.
    @keras_dist.function
    def step(x):
        _, slopes = keras_dist.value_and_grad(
            lambda: ops.mean(model(x, training=True)), variables
        )
        model.optimizer.apply(slopes, variables)

    x = models.table(8)["x"]
    (batch,) = strategy.experimental_distribute_dataset([x])
    with pytest.raises(
        keras_dist.UnsupportedModelError, match="overwritten with its gradient"
    ):
        strategy.run(step, (batch,))


@pytest.mark.only_on("tensorflow", reason="Others save in parts.")
def test_checkpoints_in_parts(tmp_path):
    with scope(2):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    for call in keras_dist.save_sharded, keras_dist.restore_sharded:
        with pytest.raises(
            keras_dist.UnsupportedModelError, match="model.save_weights"
        ):
            call(model, tmp_path / "checkpoint")
    assert not [*tmp_path.iterdir()]


class Neighbors(layers.Layer):
    """Adds up what the neighbors of each node in a graph have."""

    def call(self, inputs):
        nodes, adjacency = inputs
        return ops.matmul(adjacency, nodes)

    def compute_output_shape(self, shapes):
        return shapes[0]


@pytest.mark.runs_on("jax", "tensorflow", "torch")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_batch_that_is_one_graph(run_eagerly):
    rng = np.random.default_rng(1)
    nodes = rng.normal(size=(12, 3)).astype("float32")
    adjacency = (rng.random((12, 12)) < 0.3).astype("float32")
    y = rng.normal(size=(12, 1)).astype("float32")
    with scope(2):
        inputs = [keras.Input((3,)), keras.Input((12,))]
        outputs = layers.Dense(1)(Neighbors()(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    raises = contextlib.nullcontext()
    if not SEES_ALL_ROWS:
        raises = pytest.raises(
            keras_dist.UnsupportedModelError,
            match=r"(?s)as wide as.*\(12, 12\).*can't be divided.*one device",
        )
    with raises:
        model.fit([nodes, adjacency], y, batch_size=12, **FIT)


def test_another_error_of_a_square_batch_stays():
    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ValueError("enough")

    with scope(2):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=JIT)
    with pytest.raises(ValueError, match="^enough"):
        model.fit(np.ones((8, 8)), np.ones((8, 1)), callbacks=[Raises()], **FIT)
