"""Steps that are written with variables train alike wherever they run.

The same `train_step`, `test_step` and `predict_step`: a loop of Python calls
them on plain Keras, and on replicas `fit` and `predict` do, or `run`, compiled.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from loops.helpers import RTOL
from loops.helpers import X
from loops.helpers import Y
from loops.helpers import adam
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import mirrored
from loops.helpers import mlp
from loops.helpers import normal
from loops.helpers import outcome
from loops.helpers import replicas
from loops.helpers import started
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import to_numpy

ROWS = 14
SIZE = 7


class Distilled(keras.Model):
    """A student, and a teacher that is the average of it."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(), mlp()
        self.loss_seen = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def prepare(self):
        self.compile(adam())
        self.optimizer.build(self.student.trainable_variables)

    @property
    def metrics(self):
        return [self.loss_seen, self.accuracy]

    @property
    def optimizers(self):
        return [self.optimizer]

    def call(self, x):
        return self.teacher(x)

    def train_step(self, data):
        x, y = data
        targets = ops.stop_gradient(self.teacher(x))

        def loss_fn():
            logits = self.student(x, training=True)
            away = ops.mean(ops.square(logits - targets), axis=1)
            return self.loss_of(crossentropy(y, logits) + away, y, logits)

        variables = self.student.trainable_variables
        grads = keras_dist.gradient(loss_fn, variables)
        self.optimizer.apply(grads, variables)
        for slow, fast in zip(
            self.teacher.trainable_variables, variables, strict=True
        ):
            slow.assign(0.8 * slow + 0.2 * fast)
        return self.get_metrics_result()

    def loss_of(self, losses, y, logits):
        self.loss_seen.update_state(losses)
        self.accuracy.update_state(y, logits)
        return keras_dist.compute_average_loss(losses)

    def test_step(self, data):
        x, y = data
        logits = self.teacher(x, training=False)
        self.loss_of(crossentropy(y, logits), y, logits)
        return self.get_metrics_result()

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"teacher": self.teacher(x), "student": self.student(x)}


class Adversarial(keras.Model):
    """Two models with an optimizer each; a normalization over all rows."""

    def __init__(self):
        super().__init__()
        layers = keras.layers
        self.generator = started(
            keras.Sequential(
                [
                    keras.Input((2,)),
                    layers.Dense(5, use_bias=False),
                    layers.BatchNormalization(
                        momentum=0.8, synchronized=keras_dist.has_strategy()
                    ),
                    layers.Activation("tanh"),
                    layers.Dense(4),
                ]
            )
        )
        self.critic = mlp(4, 5, 1)
        self.losses_seen = [
            keras.metrics.Mean(name="critic"),
            keras.metrics.Mean(name="generator"),
        ]

    def prepare(self):
        self.compile(adam())
        self.of_critic = keras.optimizers.RMSprop(0.01, global_clipnorm=0.3)
        self.optimizer.build(self.generator.trainable_variables)
        self.of_critic.build(self.critic.trainable_variables)

    @property
    def metrics(self):
        return self.losses_seen

    @property
    def optimizers(self):
        return [self.optimizer, self.of_critic]

    def call(self, noise):
        return self.generator(noise)

    def critic_losses(self, noise, real, training):
        made = self.generator(noise, training=training)
        losses = self.critic(made) - self.critic(real)
        # Second order, through the critic that is trained.
        slopes = keras_dist.gradient(lambda x: ops.sum(self.critic(x)), real)
        losses = losses[:, 0] + 5.0 * ops.sum(ops.square(slopes), axis=1)
        self.losses_seen[0].update_state(losses)
        return losses

    def generator_losses(self, noise, training):
        losses = -self.critic(self.generator(noise, training=training))[:, 0]
        self.losses_seen[1].update_state(losses)
        return losses

    def train_step(self, data):
        noise, real = data

        def critic_loss():
            losses = self.critic_losses(noise, real, training=True)
            return keras_dist.compute_average_loss(losses)

        def generator_loss():
            losses = self.generator_losses(noise, training=True)
            return keras_dist.compute_average_loss(losses)

        for loss_fn, model, optimizer in (
            (critic_loss, self.critic, self.of_critic),
            (generator_loss, self.generator, self.optimizer),
        ):
            variables = model.trainable_variables
            grads = keras_dist.gradient(loss_fn, variables)
            optimizer.apply(grads, variables)
        return self.get_metrics_result()

    def test_step(self, data):
        noise, real = data
        self.critic_losses(noise, real, False)
        self.generator_losses(noise, False)
        return self.get_metrics_result()

    def predict_step(self, data):
        noise, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.generator(noise, training=False)


DATA = {Distilled: (X, Y), Adversarial: (normal(2, 2), normal(1, 4))}


def _parts(*arrays):
    """Batches, as tensors."""
    return [
        tuple(
            ops.convert_to_tensor(each[start : start + SIZE]) for each in arrays
        )
        for start in range(0, ROWS, SIZE)
    ]


def _by_hand(model, x, y):
    def epoch(step):
        for batch in _parts(x, y):
            logs = step(batch)
        logs = {name: to_numpy(value) for name, value in logs.items()}
        model.reset_metrics()
        return logs

    logs = []
    for _ in range(2):
        logs += [epoch(model.train_step), epoch(model.test_step)]
    predicted = [model.predict_step(batch) for batch in _parts(x)]
    return logs, _joined(predicted)


def _by_run(model, x, y):
    make = type(model)
    strategy = model.optimizer.iterations.distribute_strategy
    # The model's own attributes are what `fit` runs on replicas.
    train, test, predict = (
        keras_dist.function(functools.partial(step, model))
        for step in (make.train_step, make.test_step, make.predict_step)
    )

    def epoch(step):
        for batch in batches(strategy, x, y, sizes=(SIZE, SIZE)):
            strategy.run(step, args=(batch,))
        logs = {m.name: to_numpy(m.result()) for m in model.metrics}
        model.reset_metrics()
        return logs

    logs = []
    for _ in range(2):
        logs += [epoch(train), epoch(test)]
    predicted = [
        strategy.gather(strategy.run(predict, args=batch), axis=0)
        for batch in batches(strategy, x, sizes=(SIZE, SIZE))
    ]
    return logs, _joined(predicted)


def _joined(predicted):
    return keras.tree.map_structure(
        lambda *rows: np.concatenate([*map(to_numpy, rows)]), *predicted
    )


def _by_fit(model, x, y):
    x, y = x[:ROWS], y[:ROWS]
    history = model.fit(
        x,
        y,
        batch_size=SIZE,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        validation_batch_size=SIZE,
    ).history
    logs = [
        {m.name: history[prefix + m.name][epoch] for m in model.metrics}
        for epoch in range(2)
        for prefix in ("", "val_")
    ]
    return logs, model.predict(x, batch_size=SIZE, verbose=0)


def _numbers(make, train, strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        model.prepare()
    logs, predicted = train(model, *DATA[make])
    optimizers = dict(zip("ab", model.optimizers, strict=False))
    return (
        flat("logs", logs)
        | flat("predicted", predicted)
        | outcome(model=model, **optimizers)
    )


@pytest.fixture(scope="module")
def expected():
    """What the steps do that are called by hand."""
    default = keras_dist.get_strategy()
    return {make: _numbers(make, _by_hand, default) for make in DATA}


@replicas
@pytest.mark.parametrize("make", DATA)
@pytest.mark.parametrize("way", [_by_fit, _by_run])
def test_fit_and_run_are_loops_over_the_steps(
    expected, make, way, num_replicas
):
    ours = _numbers(make, way, mirrored(num_replicas))
    assert_same(ours, expected[make], rtol=RTOL)
