"""Pairs of rows are mixed into new ones by the data set."""

import keras
import numpy as np
from keras import layers
from keras import ops

from clients.programs.harness import rng


class MixUp(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, alpha=0.2, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.alpha = alpha

    def __len__(self):
        return -(-len(self.x) // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        x, y = self.x[rows], self.y[rows]
        random = np.random.default_rng(index)
        share = random.beta(self.alpha, self.alpha, len(x))
        order = random.permutation(len(x))
        images = share[:, None, None, None].astype("float32")
        labels = share[:, None].astype("float32")
        return (
            images * x + (1 - images) * x[order],
            labels * y + (1 - labels) * y[order],
        )


def make():
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        optimizer=keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.2, 10),
            nesterov=True,
            momentum=0.9,
        ),
        metrics=["categorical_accuracy"],
    )
    images = rng().uniform(size=(11, 4, 4, 1)).astype("float32")
    labels = ops.convert_to_numpy(ops.one_hot(rng().integers(0, 3, 11), 3))
    return model, {"x": MixUp(images, labels, batch_size=5)}
