"""Three images at a time: one, one like it, and one unlike it."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import BACKEND
from clients.programs.steps import descend


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        return (
            ops.sum(ops.square(anchor - positive), -1),
            ops.sum(ops.square(anchor - negative), -1),
        )


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        if len(data) != 3:
            (data,) = data

        def loss_fn():
            loss = self._compute_loss(data)
            # A number a row: TensorFlow's tape sums what it is given.
            return loss if BACKEND == "tensorflow" else ops.mean(loss), loss

        _, loss = descend(
            self.optimizer,
            loss_fn,
            self.siamese_network.trainable_weights,
        )
        self.loss_tracker.update_state(ops.stop_gradient(loss))
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        if len(data) != 3:
            (data,) = data
        self.loss_tracker.update_state(self._compute_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        near, far = self.siamese_network(data)
        return ops.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


train_step_of = SiameseModel
SHOWS = ("evaluate",)


def make():
    embedding = keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(3)]
    )
    images = [keras.Input((6,)) for _ in range(3)]
    distances = DistanceLayer()(*(embedding(image) for image in images))
    model = SiameseModel(keras.Model(images, distances))
    model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.5))
    triplets = rng().normal(size=(3, ROWS, 6)).astype("float32")
    return model, {"x": tuple(triplets)}
