"""Models with parts of TensorFlow's own train as on one device."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops

import keras_dist
from keras_dist.errors import UnsupportedModelError
from parity.harness import assert_same
from parity.harness import central
from parity.harness import scope
from parity.harness import state_of
from parity.harness import strategy as strategy_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(23, 5)).astype("float32")
Y = RNG.integers(0, 3, 23)
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def make_model(*extra, optimizer="sgd", inputs=None, **compile_kwargs):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)) if inputs is None else inputs,
            *[make() for make in extra],
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        optimizer() if callable(optimizer) else optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **compile_kwargs,
    )
    return model


def assert_like_plain(build, run, num_replicas=(2, 3), rtol=2e-5):
    """Trains plainly and on replicas, and compares all variables."""

    def outcome(count):
        with scope(count):
            model = build()
        run(model)
        return state_of(model)

    plain = outcome(None)
    for count in num_replicas:
        assert_same(outcome(count), plain, rtol)


def test_ragged_inputs():
    rows = tf.ragged.constant(
        [list(range(1 + i % 4)) for i in range(23)], dtype="int32"
    )
    data = tf.data.Dataset.from_tensor_slices((rows, Y)).batch(8)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(7, 4)
            self.out = layers.Dense(3, activation="softmax")

        def build(self, _):
            self.embedding.build((None, None))
            self.out.build((None, 4))
            self.built = True

        def call(self, x):
            vectors = self.embedding(x.to_tensor())
            lengths = tf.cast(x.row_lengths(), "int32")
            mask = tf.sequence_mask(lengths, ops.shape(vectors)[1])
            mask = tf.cast(mask, vectors.dtype)[:, :, None]
            return self.out(ops.sum(vectors * mask, axis=1))

    def build():
        keras.utils.set_random_seed(0)
        model = Model()
        model.build(None)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    assert_like_plain(
        build, lambda m: m.fit(data, epochs=2, shuffle=False, verbose=0)
    )


def test_batches_of_every_small_size():
    """Known when traced or not; most leave replicas without rows."""

    def run(model):
        model.fit(X[:7], Y[:7], **{**FIT, "batch_size": 2})
        for rows in (1, 2, 3, 5, 3, 1):
            model.train_on_batch(X[:rows], Y[:rows])
            model.test_on_batch(X[:rows], Y[:rows])

    assert_like_plain(
        lambda: make_model(layers.BatchNormalization), run, (2, 4)
    )


def test_variables_made_in_a_step_are_refused():
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(3)

        def train_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"mean": ops.mean(self.inner(x))}

    with scope(2):
        model = Lazy()
        model.compile()
    with pytest.raises(UnsupportedModelError, match="Build the model before"):
        model.fit(X, **FIT)


def test_an_adopted_models_optimizer_goes_on():
    """Moved variables keep their slots and their weight decay."""

    def outcome(num_replicas):
        model = make_model(
            lambda: layers.Dense(4),
            optimizer=lambda: keras.optimizers.AdamW(0.01, weight_decay=0.2),
        )
        model.optimizer.exclude_from_weight_decay([model.layers[0].kernel])
        model.fit(X, Y, **FIT)
        if num_replicas is not None:
            strategy = strategy_of(num_replicas)
            strategy.distribute(model)
            # Another one that moves before the first is used again.
            other = strategy.distribute(make_model(optimizer="adam"))
            other.fit(X, Y, **FIT)
        model.fit(X, Y, **FIT)
        return state_of(model)

    plain = outcome(None)
    for num_replicas in (1, 2):
        assert_same(outcome(num_replicas), plain)


@pytest.mark.parametrize("kind", ["cond", "while_loop", "recurrent"])
def test_a_rendezvous_in_control_flow_is_refused(kind):
    class Flow(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(name="inner_norm")

        def build(self, shape):
            self.norm.build(shape)

        def call(self, x, training=False):
            def body(x):
                return self.norm(x, training=training)

            if kind == "cond":
                positive = ops.sum(ops.abs(x)) > 0
                return tf.cond(positive, lambda: body(x), lambda: x)
            if kind == "while_loop":
                return tf.while_loop(
                    lambda i, _: i < 1, lambda i, x: (i + 1, body(x)), [0, x]
                )[1]
            return tf.map_fn(body, x[None])[0]

    with scope(2):
        model = make_model(Flow)
    with pytest.raises(Exception, match="inner_norm") as info:
        model.fit(X, Y, **FIT)
    assert isinstance(info.value, UnsupportedModelError)
    assert "run_eagerly=True" in str(info.value)


# One replica's variables may be on another device.
@pytest.mark.parametrize(("make", "count"), [(strategy_of, 2), (central, 1)])
def test_compilation_is_off_with_a_notice(make, count):
    with scope(count, make):
        model = make_model(jit_compile=True)
    with pytest.warns(UserWarning, match="XLA compilation is off"):
        model.fit(X, Y, **FIT)
    assert not model.jit_compile
    with scope(count, make):
        silent = make_model(jit_compile="auto")
    silent.fit(X, Y, **FIT)


def test_models_of_several_strategies_in_turns_and_threads():
    """On CPU devices, TensorFlow's own collectives of two models collide."""
    made = []
    strategies = [*map(strategy_of, (2, 3, 2)), central(2), central(3)]
    for opened in (scope(None), *(each.scope() for each in strategies)):
        with opened:
            made.append(make_model(layers.BatchNormalization))
    for _ in range(2):
        for model in made:
            thread = threading.Thread(target=model.fit, args=(X, Y), kwargs=FIT)
            thread.start()
            thread.join()
    for model in made[1:]:
        assert_same(state_of(model), state_of(made[0]))


def test_models_of_another_strategy_can_be_read_in_a_scope():
    with scope(2):
        model = make_model()
    with scope(3):
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
    for got, want in zip(copy.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_xla_compiles_a_step_that_builds_its_optimizer():
    """One device trains as plain Keras does, from the first step on."""

    def trained(scope):
        with scope:
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            model = make_model(optimizer=optimizer, jit_compile=True)
        model.fit(X, Y, **FIT)
        return state_of(model)

    plain = trained(scope(None))
    found = trained(keras_dist.OneDeviceStrategy("cpu:0").scope())
    assert_same(found, plain, 1e-6)
