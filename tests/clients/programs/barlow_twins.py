"""Two views of each image, whose features should be alike and independent."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import Tracked


class BarlowLoss(keras.losses.Loss):
    """Compares the features over the batch: no sum of losses of rows."""

    def __init__(self, weight=0.01):
        super().__init__()
        self.weight = weight

    def call(self, z_a, z_b):
        rows = ops.cast(ops.shape(z_a)[0], "float32")
        z_a = (z_a - ops.mean(z_a, axis=0)) / (ops.std(z_a, axis=0) + 0.1)
        z_b = (z_b - ops.mean(z_b, axis=0)) / (ops.std(z_b, axis=0) + 0.1)
        correlation = ops.matmul(ops.transpose(z_a), z_b) / rows
        wanted = ops.eye(ops.shape(correlation)[0])
        costs = ops.square(correlation - wanted)
        return ops.sum(
            ops.where(ops.cast(wanted, "bool"), costs, costs * self.weight)
        )


class BarlowTwins(Tracked):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.barlow_loss = BarlowLoss()

    def call(self, x):
        return self.encoder(x)

    def losses(self, views):
        z_a, z_b = (self.encoder(view, training=True) for view in views)
        return (self.barlow_loss(z_a, z_b),)


train_step_of = BarlowTwins
SHOWS = ()


def make():
    encoder = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dense(3),
        ]
    )
    model = BarlowTwins(encoder)
    model.build((None, 6))
    model.compile(keras.optimizers.Adam(0.01))
    x = rng().normal(size=(ROWS, 6)).astype("float32")
    return model, {"x": (x, x * 0.9 + 0.05)}
