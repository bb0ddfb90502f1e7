"""Contrastive pretraining: two views of each image, told from all others."""

import keras
from keras import layers
from keras import ops

import keras_dist
from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import descend


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.temperature = 0.2
        self.encoder = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, activation="gelu")]
        )
        self.projection_head = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(4, activation="gelu"),
                layers.Dense(4),
            ]
        )
        self.built = True

    def compile(self, contrastive_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        contrastive_optimizer.build(
            [*self.encoder.weights, *self.projection_head.weights]
        )
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(
            name="c_acc"
        )

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.contrastive_accuracy]

    def all_rows(self, projections):
        return projections

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = self.all_rows(projections_1)
        projections_2 = self.all_rows(projections_2)
        projections_1 = ops.normalize(projections_1, axis=1)
        projections_2 = ops.normalize(projections_2, axis=1)
        similarities = (
            ops.matmul(projections_1, ops.transpose(projections_2))
            / self.temperature
        )
        labels = ops.arange(ops.shape(projections_1)[0])
        losses = []
        for each in (similarities, ops.transpose(similarities)):
            self.contrastive_accuracy.update_state(labels, each)
            losses.append(
                keras.losses.sparse_categorical_crossentropy(
                    labels, each, from_logits=True
                )
            )
        return ops.mean((losses[0] + losses[1]) / 2)

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]

        def loss_fn():
            features_1 = self.encoder(data * 0.9, training=True)
            features_2 = self.encoder(data + 0.1, training=True)
            return (
                self.contrastive_loss(
                    self.projection_head(features_1, training=True),
                    self.projection_head(features_2, training=True),
                ),
            )

        (loss,) = descend(
            self.contrastive_optimizer,
            loss_fn,
            self.encoder.trainable_weights
            + self.projection_head.trainable_weights,
        )
        self.contrastive_loss_tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


train_step_of = ContrastiveModel
SHOWS = ()
# Replicas compare their own rows.
_ERROR = "metric 'c_acc'.*depend on their number of rows.*all_gather"
REFUSED = {"tensorflow": _ERROR, "torch": _ERROR}


class Repaired(ContrastiveModel):
    def all_rows(self, projections):
        context = keras_dist.get_replica_context()
        return context.all_gather(projections, axis=0)


def repaired():
    return make(Repaired)


def make(cls=ContrastiveModel):
    model = cls()
    model.compile(contrastive_optimizer=keras.optimizers.Adam(0.01))
    return model, {"x": rng().normal(size=(ROWS, 6)).astype("float32")}
