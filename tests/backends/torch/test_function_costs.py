"""What a step of a training loop costs on PyTorch, counted."""

import keras
import numpy as np
import pytest

import keras_dist
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

    @keras_dist.function
    def train_step(x):
        def loss_fn():
            losses = keras.ops.mean(model(x, training=True) ** 2, axis=-1)
            mean.update_state(losses)
            return keras_dist.compute_average_loss(losses, global_batch_size=8)

        loss, grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        optimizer.apply(grads, model.trainable_variables)
        return loss

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
