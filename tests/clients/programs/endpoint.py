"""A layer at the end of a model that has the loss and the metric in it."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import BACKEND


class LogisticEndpoint(layers.Layer):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, targets, logits, sample_weight=None):
        if targets is not None:
            loss = self.loss_fn(targets, logits, sample_weight)
            self.add_loss(loss)
            if BACKEND != "jax":  # where Keras has no metrics in layers
                self.accuracy_metric.update_state(
                    targets, logits, sample_weight
                )
        return ops.softmax(logits)


def make():
    inputs = keras.Input((3,), name="inputs")
    targets = keras.Input((4,), name="targets")
    logits = layers.Dense(4)(inputs)
    predictions = LogisticEndpoint(name="predictions")(targets, logits)
    model = keras.Model(inputs=[inputs, targets], outputs=predictions)
    model.compile(keras.optimizers.Adam(1e-2))
    data = {
        "inputs": rng().normal(size=(ROWS, 3)).astype("float32"),
        "targets": rng().integers(0, 2, (ROWS, 4)).astype("float32"),
    }
    return model, {"x": data}
