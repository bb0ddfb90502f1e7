"""One seed gives one set of numbers, with a strategy and without one."""

import json
import random
import threading

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import random_state
from parity.harness import BACKEND
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import central
from parity.harness import scope
from parity.harness import state_of
from parity.harness import strategy

MAKE = {
    "one_device": lambda _: keras_dist.OneDeviceStrategy("cpu:0"),
    "mirrored": strategy,
    "central": central,
}

pytestmark = pytest.mark.skipif(
    PLAIN_ONLY, reason="It compares a strategy with plain Keras."
)


def _states():
    return json.loads(random_state(get_backend()))


def _seeded():
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_draws_without_a_seed_are_those_without_a_strategy(make):
    """Inside of a scope, and after one, which draws nothing itself."""

    def drawn():
        numbers = [random.random(), np.random.random()]
        noise = keras.random.normal((3,))
        layer = layers.Dense(2)
        layer.build((None, 2))
        again = keras.random.uniform((2,)), layer.kernel, random.random()
        return [
            np.ravel(to_array(x)).tolist() for x in (numbers, noise, *again)
        ]

    def names():
        return [layers.Dense(1).name, keras.random.SeedGenerator(1).name]

    _seeded()
    expected = drawn(), names()
    _seeded()
    made = make(2)
    with made.scope():
        inside = drawn()
    assert (inside, names()) == expected
    _seeded()
    before = _states()
    assert before["keras"] is None
    with made.scope(), made.scope():
        pass
    made.run(lambda: 1)
    assert _states() == before
    assert (drawn(), names()) == expected


def to_array(value):
    if isinstance(value, keras.Variable):
        value = value.value
    return np.asarray(ops.convert_to_numpy(value))


class Noise(layers.Layer):
    """Adds noise that is drawn without a seed, the same for all rows.

    Plain Keras refuses such draws in a traced step on JAX.
    """

    def call(self, x, training=None):
        if not training or BACKEND == "jax":
            return x
        return x + keras.random.normal((1, x.shape[-1]))


class InLine(keras.utils.PyDataset):
    """Batches in an order that Python's random numbers decide."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        x = np.arange(35.0, dtype="float32").reshape(7, 5) / 35 + index
        return x, x[:, :1]


def _trained(num_replicas, make=None):
    """Builds and trains two models, with shuffled rows and batches."""
    _seeded()
    found = {}
    x = np.random.default_rng(0).random((23, 5)).astype("float32")
    for name in ("first", "second"):
        with scope(num_replicas, make):
            model = keras.Sequential(
                [layers.Dense(5, activation="tanh"), Noise(), layers.Dense(1)]
            )
            model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=7, epochs=2, verbose=0)
        model.fit(InLine(), shuffle=True, epochs=2, verbose=0)
        found |= {f"{name}/{k}": value for k, value in state_of(model).items()}
    found["python"] = np.asarray(random.random())
    found["numpy"] = np.asarray(np.random.random())
    found["keras"] = to_array(keras.random.uniform((3,)))
    return found


@pytest.mark.parametrize(
    ("make", "num_replicas"),
    [("one_device", 1), ("mirrored", 1), ("mirrored", 3), ("central", 2)],
)
def test_models_begin_and_train_alike(make, num_replicas):
    """Weights, order of rows, noise without a seed, and what comes later."""
    assert_same(_trained(num_replicas, MAKE[make]), _trained(None))


def test_a_generator_that_begins_in_run():
    """It begins where Keras' own would, and the caller goes on with it."""

    def draw():
        return keras.random.normal((2,))

    _seeded()
    expected = to_array(draw()).tolist(), random.random()
    made = strategy(2)
    _seeded()
    with made.scope():
        first = made.run(draw).values[0]
    assert (to_array(first).tolist(), random.random()) == expected
    state = keras.src.backend.common.global_state
    name = "global_seed_generator"
    generator = state.get_global_attribute(name)
    assert isinstance(generator, keras.random.SeedGenerator)
    assert "distribute_strategy" not in vars(generator.state)


def test_a_generator_that_begins_in_two_threads_at_once():
    """All replicas draw from one: the seed is drawn once."""
    from keras_dist.internals import keras_random

    _seeded()
    random_seed = random.Random()
    random_seed.setstate(random.getstate())
    keras_random.lend_global_seed()
    generator = keras_random.global_state.get_global_attribute(
        "global_seed_generator"
    )
    states, start = [], threading.Barrier(4)

    def begin():
        start.wait()
        states.append(generator.state)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in states}) == 1 and len(states) == 4
    assert to_array(states[0]).tolist() == [random_seed.randint(1, int(1e9)), 0]
    assert random.getstate() == random_seed.getstate()
