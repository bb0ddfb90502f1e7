"""An autoencoder of experts: a gate that is balanced, activities that cost."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng

EXPERTS = 3


class Experts(layers.Layer):
    """Experts, and a loss for gates that use them unevenly."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(EXPERTS, activation="softmax")
        self.experts = [
            layers.Dense(units, activation="gelu") for _ in range(EXPERTS)
        ]

    def call(self, x):
        gates = self.gate(x)
        # Of each row on its own: the entropy of its gates.
        entropy = -ops.sum(gates * ops.log(gates + 1e-6), axis=-1)
        self.add_loss(0.01 * ops.mean(entropy))
        outputs = ops.stack([expert(x) for expert in self.experts], axis=1)
        return ops.sum(outputs * gates[:, :, None], axis=1)


def make():
    inputs = keras.Input((6,))
    x = layers.Dense(5, activation="gelu", kernel_regularizer="l2")(inputs)
    x = Experts(4)(x)
    code = layers.Dense(
        2, activity_regularizer=keras.regularizers.L1(0.05), name="code"
    )(x)
    x = layers.ActivityRegularization(l2=0.02)(layers.Dense(5)(code))
    model = keras.Model(inputs, layers.Dense(6)(x))
    model.compile("adam", loss="mse", metrics=["mae"])
    x = rng().normal(size=(ROWS, 6)).astype("float32")
    return model, {"x": x, "y": x}
