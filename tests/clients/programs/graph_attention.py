"""Attention along the edges of a graph; a batch is a list of its nodes."""

import keras
import numpy as np
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import descend

NODES, CLASSES = 6, 3


class GraphAttention(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[0][-1], self.units), name="kernel"
        )
        self.kernel_attention = self.add_weight(
            shape=(self.units * 2, 1), name="kernel_attention"
        )
        self.built = True

    def call(self, inputs):
        node_states, edges = inputs
        transformed = ops.matmul(node_states, self.kernel)
        pairs = ops.reshape(
            ops.take(transformed, edges, axis=0), (ops.shape(edges)[0], -1)
        )
        scores = ops.leaky_relu(ops.matmul(pairs, self.kernel_attention))
        scores = ops.exp(ops.clip(ops.squeeze(scores, -1), -2, 2))
        sums = ops.segment_sum(scores, edges[:, 0], num_segments=NODES)
        normalized = scores / ops.take(sums, edges[:, 0], axis=0)
        neighbours = ops.take(transformed, edges[:, 1], axis=0)
        return ops.segment_sum(
            neighbours * normalized[:, None], edges[:, 0], num_segments=NODES
        )


class GraphAttentionNetwork(keras.Model):
    def __init__(self, node_states, edges, **kwargs):
        super().__init__(**kwargs)
        self.node_states = node_states
        self.edges = edges
        self.preprocess = layers.Dense(4, activation="relu")
        self.attention = GraphAttention(4)
        self.output_layer = layers.Dense(CLASSES)

    def compile(self, loss, metric, **kwargs):
        super().compile(**kwargs)
        self.loss_fn = loss
        self.metric = metric
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker, self.metric]

    def call(self, inputs):
        node_states, edges = inputs
        x = self.preprocess(node_states)
        x = self.attention([x, edges]) + x
        return self.output_layer(x)

    def outputs(self, indices):
        return ops.take(self([self.node_states, self.edges]), indices, axis=0)

    def tracked(self, loss, outputs, labels):
        self.loss_tracker.update_state(loss, sample_weight=ops.shape(labels)[0])
        self.metric.update_state(labels, outputs)
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, data):
        indices, labels = data

        def loss_fn():
            outputs = self.outputs(indices)
            return self.loss_fn(labels, outputs), outputs

        results = descend(self.optimizer, loss_fn, self.trainable_weights)
        return self.tracked(*results, labels)

    def test_step(self, data):
        indices, labels = data
        outputs = self.outputs(indices)
        return self.tracked(self.loss_fn(labels, outputs), outputs, labels)

    def predict_step(self, data):
        indices, *_ = keras.utils.unpack_x_y_sample_weight(data)
        return ops.softmax(self.outputs(indices))


train_step_of = GraphAttentionNetwork


def make():
    states = ops.convert_to_tensor(
        rng().normal(size=(NODES, 5)).astype("float32")
    )
    ring = np.array(
        [(i, (i + n) % NODES) for i in range(NODES) for n in (0, 1, 3)]
    )
    edges = ops.convert_to_tensor(ring.astype("int32"))
    model = GraphAttentionNetwork(states, edges)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        metric=keras.metrics.SparseCategoricalAccuracy(),
    )
    model([states, edges])
    nodes = rng().integers(0, NODES, ROWS)
    return model, {"x": nodes, "y": nodes % CLASSES}
