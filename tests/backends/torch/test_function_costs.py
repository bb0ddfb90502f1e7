"""In a step of a loop on PyTorch, replicas meet once to update."""

import keras
import numpy as np
import pytest

import keras_dist
import steps
from keras_dist_torch.replica import TorchReplica


def make_step(layers):
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((4,))]
            + [keras.layers.Dense(4) for _ in range(layers)]
        )
        optimizer = keras.optimizers.Adam(name="adam")
        mean = keras.metrics.Mean()
    optimizer.build(model.trainable_variables)

    def losses_of(x):
        losses = keras.ops.mean(model(x, training=True) ** 2, axis=-1)
        mean.update_state(losses)
        return losses

    step = steps.train_step(model, optimizer, losses_of, global_batch_size=8)
    train_step = keras_dist.function(step)
    return strategy, train_step


@pytest.mark.parametrize("layers", [1, 10])
def test_replicas_meet_once_to_update_and_once_to_end(monkeypatch, layers):
    strategy, train_step = make_step(layers)
    (batch,) = strategy.experimental_distribute_dataset(
        [np.ones((8, 4), "float32")]
    )
    strategy.run(train_step, args=(batch,))
    met = []
    original = TorchReplica.rendezvous

    def rendezvous(self, what, fn, value):
        met.append((self.index, what))
        return original(self, what, fn, value)

    monkeypatch.setattr(TorchReplica, "rendezvous", rendezvous)
    strategy.run(train_step, args=(batch,))
    for replica in range(2):
        own = [what for index, what in met if index == replica]
        assert own == [
            "the update by optimizer 'adam'",
            "the end of the replica function",
        ]
