"""Embeddings by pairs of images: the similarity of each with all others.

A batch is two stacks of images, anchors and positives, one of each class.
"""

import keras
import numpy as np
from keras import layers
from keras import ops

from clients.programs.steps import descend

CLASSES = 5


class AnchorPositivePairs(keras.utils.PyDataset):
    def __init__(self, num_batches, **kwargs):
        super().__init__(**kwargs)
        self.length = num_batches

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        return random.normal(size=(2, CLASSES, 4, 4, 1)).astype("float32")


class EmbeddingModel(keras.Model):
    def compile(self, loss, **kwargs):
        super().compile(**kwargs)
        self.loss_fn = loss
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        if isinstance(data, (tuple, list)):
            data = data[0]
        anchors, positives = data[0], data[1]

        def loss_fn():
            anchor_embeddings = self(anchors, training=True)
            positive_embeddings = self(positives, training=True)
            similarities = ops.einsum(
                "ae,pe->ap", anchor_embeddings, positive_embeddings
            )
            similarities /= 0.2
            labels = ops.arange(CLASSES)
            return (self.loss_fn(labels, similarities),)

        (loss,) = descend(self.optimizer, loss_fn, self.trainable_weights)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


train_step_of = EmbeddingModel
SHOWS = ()
# Cut along the first axis, a replica has anchors or positives, not both.
REFUSED = {"tensorflow": "out of bounds", "torch": "out of bounds"}


def make():
    inputs = keras.Input((4, 4, 1))
    x = layers.Conv2D(3, 3, strides=2, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.UnitNormalization()(layers.Dense(3)(x))
    model = EmbeddingModel(inputs, x)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model, {"x": AnchorPositivePairs(2)}
