"""Variables and optimizers outside of replicas are as plain Keras has them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import keras_dist

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: optimizers.Adam(0.1),
    "accumulated": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "average": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
}
GRADIENT = np.array([[1.0, -2.0], [0.5, 3.0]], "float32")


def strategy_of(num_replicas=2):
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(num_replicas)]
    )


def central_of():
    return keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:3")


def dense():
    return tf.constant(GRADIENT)


def sparse():
    rows = tf.constant([1, 0, 1])
    values = tf.constant([[1.0, 2.0], [0.5, 0.5], [-3.0, 1.0]])
    return tf.IndexedSlices(values, rows, tf.constant([2, 2]))


def made(make):
    return make(np.ones((2, 2), "float32"))


def applied(optimizer, variable, gradient):
    for _ in range(3):
        optimizer.apply([gradient()], [variable])
    return np.asarray(tf.convert_to_tensor(variable))


# Plain Keras takes native variables with some settings only.
KINDS = [(name, keras.Variable) for name in OPTIMIZERS]
KINDS += [(name, tf.Variable) for name in ("sgd", "momentum", "adam")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("gradient", [dense, sparse])
def test_apply_outside_of_run(name, kind, gradient):
    expected = applied(OPTIMIZERS[name](), made(kind), gradient)
    for make in (strategy_of, central_of):
        strategy = make()
        with strategy.scope():
            inside = made(kind)
            within = applied(OPTIMIZERS[name](), inside, gradient)
            variable = made(kind)
            optimizer = OPTIMIZERS[name]()
        for actual in (
            within,
            applied(optimizer, variable, gradient),
            applied(OPTIMIZERS[name](), _new(strategy, kind), gradient),
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-6)


def _new(strategy, kind):
    with strategy.scope():
        return made(kind)


class Noting(optimizers.SGD):
    """Notes of what kind the updates of tables are."""

    def __init__(self):
        super().__init__(0.1)
        self.kinds = set()

    def assign_sub(self, variable, value):
        self.kinds.add(type(value))
        super().assign_sub(variable, value)


@pytest.mark.parametrize("make", [strategy_of, central_of])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_sparse_gradients_stay_sparse(make, is_scaled):
    with make().scope():
        optimizer = noting = Noting()
        if is_scaled:
            optimizer = optimizers.LossScaleOptimizer(noting)
        model = keras.Sequential([keras.layers.Embedding(9, 1)])
        model.build((None, 2))
        model.compile(optimizer, "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 2, 1)), verbose=0)
        optimizer.apply([sparse()], model.trainable_variables)
    assert noting.kinds == {tf.IndexedSlices}


def test_apply_in_a_function():
    with strategy_of().scope():
        variable = made(keras.Variable)
        optimizer = optimizers.SGD(0.1)
        optimizer.build([variable])

    @tf.function
    def step():
        optimizer.apply([dense()], [variable])

    step()
    np.testing.assert_allclose(variable.numpy(), 1.0 - 0.1 * GRADIENT)


@pytest.mark.parametrize("make", [strategy_of, central_of])
def test_an_optimizer_of_other_variables(make):
    x = np.ones((4, 2), "float32")
    with make().scope():
        optimizer = optimizers.Adam()
        for expected in (None, "Unknown variable: "):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
            if expected is None:
                model.fit(x, x[:, :1], verbose=0)
                continue
            with pytest.raises(ValueError, match=expected):
                model.fit(x, x[:, :1], verbose=0)


CONVERSIONS = [int, float, complex]


@pytest.mark.parametrize("value", [3, 2.5, True, 0])
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_a_number(convert, value):
    plain = keras.Variable(value, trainable=False)
    with strategy_of().scope():
        ours = keras.Variable(value, trainable=False)
    assert convert(ours.value) == convert(plain.value)
    if convert in (int, float):  # else as plain Keras, which has none
        assert convert(ours) == convert(plain)


def test_what_is_no_number():
    with strategy_of().scope():
        vector = keras.Variable([1.0, 2.0])
    with pytest.raises(TypeError, match="size-1|only length-1|scalar"):
        float(vector.value)


def test_a_counter_that_a_callback_reads():
    class Counter(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.counter = self.add_weight(
                shape=(), dtype="int32", trainable=False
            )

        def call(self, x):
            self.counter.assign_add(1)
            return x

    with strategy_of().scope():
        layer = Counter()
        model = keras.Sequential([layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(int(layer.counter.value))
    )
    x = np.ones((4, 2), "float32")
    model.fit(x, x[:, :1], epochs=3, callbacks=[callback], verbose=0)
    assert seen == [1, 2, 3]


def test_an_adopted_model_is_exported(tmp_path):
    """TensorFlow saves no dict that was changed behind its back."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    x, y = np.ones((8, 4), "float32"), np.ones((8, 3), "float32")
    model.fit(x, y, verbose=0)
    keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).distribute(model)
    model.fit(x, y, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(loaded.serve(x), expected, rtol=1e-5)
