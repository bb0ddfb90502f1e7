"""Layers with Keras' trainer mixed in train as models do.

Keras' own tests make models in this way. Its class of trainers is private,
and each backend has one.
"""

import keras
import pytest
from keras import layers

import keras_dist
from parity import models
from parity.harness import FIT
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import central
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import sharded
from parity.harness import state_of
from parity.harness import strategy as mirrored

Trainer = keras.Model.__bases__[0]
BACKEND = keras.backend.backend()
DATA = models.table(21)


class TrainerFirst(Trainer, layers.Layer):
    """One whose trainer is ready before the layer is."""

    def __init__(self):
        Trainer.__init__(self)
        layers.Layer.__init__(self, name="trainer_first")
        self.hidden = layers.Dense(5, activation="tanh")
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(1, kernel_regularizer="l2")

    def call(self, x, training=None):
        x = self.hidden(x)
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x), axis=-1))
        return self.out(self.norm(x, training=training))


class LayerFirst(Trainer, layers.Dense):
    """One that is a layer of Keras' own, and is built by its first batch."""

    def __init__(self):
        layers.Dense.__init__(
            self, 1, "tanh", kernel_initializer="ones", name="layer_first"
        )
        Trainer.__init__(self)


def _outcome(kind, num_replicas, make, eagerly):
    keras.utils.set_random_seed(5)
    with scope(num_replicas, make):
        model = kind()
        model.compile(
            "adam", "mse", metrics=["mae"], run_eagerly=eagerly, jit_compile=JIT
        )
        if kind is TrainerFirst:
            model(keras.ops.ones((1, 4)))
            set_initial_weights(model)
        history = model.fit(**DATA, **FIT).history
    logs = model.evaluate(**DATA, verbose=0, return_dict=True)
    return (
        flat("history", history)
        | flat("evaluate", logs)
        | flat("predict", model.predict(DATA["x"], verbose=0))
        | flat("batch", model.train_on_batch(DATA["x"], DATA["y"]))
        | state_of(model)
    )


CASES = [
    (kind, eagerly, mirrored)
    for kind in (TrainerFirst, LayerFirst)
    for eagerly in (False, True)
]
CASES.append((TrainerFirst, False, central))
if BACKEND == "jax":  # others shard nothing in one process
    CASES.append((TrainerFirst, False, sharded))


@pytest.mark.parametrize(("kind", "eagerly", "make"), CASES)
def test_it_trains_as_on_one_device(kind, eagerly, make):
    ours, plain = (_outcome(kind, n, make, eagerly) for n in (2, None))
    assert_same(ours, plain)


no_plain_counterpart = pytest.mark.skipif(
    PLAIN_ONLY, reason="It has no plain counterpart."
)


@no_plain_counterpart
def test_it_really_runs_on_replicas():
    rows = []

    class Looks(LayerFirst):
        def compute_loss(self, x=None, *args, **kwargs):
            rows.append(x.shape[0])
            return super().compute_loss(x, *args, **kwargs)

    strategy = mirrored(2)
    with strategy.scope():
        model = Looks()
        model.compile("sgd", "mse", run_eagerly=True)
    # The first step may be split unevenly.
    model.fit(DATA["x"][:8], DATA["y"][:8], batch_size=8, epochs=2, verbose=0)
    assert model.kernel.distribute_strategy is strategy
    # JAX shares out the rows of one array; the others call each replica.
    if BACKEND == "jax":
        assert strategy.devices_of(model.kernel) == ("cpu:0", "cpu:1")
    else:
        assert rows[-2:] == [4, 4]


@no_plain_counterpart
def test_it_is_adopted_and_refused_as_a_model_is():
    model = LayerFirst()
    model.compile("sgd", "mse")
    strategy = mirrored(2)
    assert strategy.distribute(model) is model
    model.fit(**DATA, **FIT)
    assert model.kernel.distribute_strategy is strategy
    with pytest.raises(keras_dist.StrategyMismatchError, match="layer_first"):
        mirrored(3).distribute(model)
    plain = LayerFirst()
    with strategy.scope():
        plain.compile("adam", "mse")
    with pytest.raises(
        keras_dist.StrategyMismatchError, match="outside of any scope"
    ):
        plain.fit(**DATA, **FIT)
