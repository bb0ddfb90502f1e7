"""What the tests of compiled functions share."""

import keras
import numpy as np
import pytest

import keras_dist
from gradients.helpers import array
from gradients.helpers import cut
from gradients.helpers import local
from gradients.helpers import strategy_of
from gradients.helpers import total

__all__ = ["array", "cut", "local", "strategy_of", "total"]

BACKEND = keras.backend.backend()
# PyTorch runs functions as they are.
TRACES = BACKEND != "torch"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 5)).astype("float32")
Y = RNG.integers(0, 3, 22)

replicas = pytest.mark.parametrize("num_replicas", [1, 2, 4])


def batches(strategy, *arrays, size=8):
    """A distributed dataset of the rows of arrays; the last batch is short."""
    rows = len(arrays[0])
    steps = [
        tuple(each[i : i + size] for each in arrays)
        for i in range(0, rows, size)
    ]
    return strategy.experimental_distribute_dataset(
        [step if len(arrays) > 1 else step[0] for step in steps]
    )


def ids(strategy):
    """Each replica's number, as a float tensor."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: keras.ops.convert_to_tensor(
            float(context.replica_id_in_sync_group)
        )
    )


def numbers(value):
    """Each replica's component, as Python numbers or lists."""
    return [part.tolist() for part in local(value)]


class Unhashable:
    """Two of them are equal if they say the same; they have no hash."""

    def __eq__(self, other):
        return True


class Classifier:
    """The parts of a training loop: a model, its optimizer, a metric.

    Args:
        strategy: The `Strategy`.
        *layers: Layers that come first; callables without arguments.
    """

    def __init__(self, strategy, *layers):
        self.strategy = strategy
        self.traces = 0
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((5,)),
                    *[layer() for layer in layers],
                    keras.layers.Dense(3),
                ]
            )
            self.optimizer = keras.optimizers.Adam(0.1)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(self, x, y):
        """One step of training, on one replica."""
        self.traces += 1

        def loss_fn():
            logits = self.model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            self.accuracy.update_state(y, logits)
            return keras_dist.compute_average_loss(losses)

        variables = self.model.trainable_variables
        loss, grads = keras_dist.value_and_grad(loss_fn, variables)
        self.optimizer.apply(grads, variables)
        return loss

    def epoch(self, step):
        """Trains on all batches; the losses, the accuracy, and the weights."""
        losses = [
            total(self.strategy, self.strategy.run(step, args=batch))
            for batch in batches(self.strategy, X, Y)
        ]
        accuracy = float(array(self.accuracy.result()))
        self.accuracy.reset_state()
        return losses, accuracy, [array(v) for v in self.model.weights]


def assert_same(ours, theirs, tolerance=2e-5):
    """Compares nests of numbers."""
    ours, theirs = keras.tree.flatten(ours), keras.tree.flatten(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
