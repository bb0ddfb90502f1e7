"""A loop of one's own with `run` or `scan_steps` is that of plain Keras."""

import keras
import numpy as np
import pytest

import keras_dist
from gpu import models
from gpu import numbers
from gpu import places
from gpu.numbers import STRATEGIES

STEPS, BATCH = 4, 11


def batches():
    x, y = models.data("mlp", STEPS * BATCH)
    starts = range(0, STEPS * BATCH, BATCH)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in starts]


def train_step_of(model, optimizer):
    """Returns a replica function that trains on one batch."""

    @keras_dist.function
    def train_step(x, y):
        def loss_fn():
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            return keras_dist.compute_average_loss(losses)

        loss, gradients = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return train_step


def looped(strategy, scans):
    """Returns the losses and the weights of a loop, all steps in a call."""
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = models.mlp()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    train_step = train_step_of(model, optimizer)
    data = strategy.experimental_distribute_dataset(batches())
    if scans:
        found = keras_dist.scan_steps(train_step, iter(data), STEPS)
        losses = strategy.reduce("SUM", found, axis=None)
    else:
        found = [strategy.run(train_step, args) for args in data]
        losses = [
            models.to_numpy(strategy.reduce("SUM", each, axis=None))
            for each in found
        ]
    return np.asarray(models.to_numpy(losses)), model


@pytest.mark.parametrize("scans", [False, True], ids=["run", "scan_steps"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_loop(name, scans):
    losses, model = looped(STRATEGIES[name](), scans)
    with numbers.plain_keras():
        plain = models.compiled("mlp")
        expected = [
            float(plain.train_on_batch(x, y, return_dict=True)["loss"])
            for x, y in batches()
        ]
    assert losses == pytest.approx(np.asarray(expected), rel=1e-3)
    for got, want in zip(model.weights, plain.weights, strict=True):
        numbers.assert_same(
            {want.path: models.to_numpy(got)},
            {want.path: models.to_numpy(want)},
        )


def test_replica_functions_run_on_the_gpu():
    strategy = keras_dist.MirroredStrategy([places.DEVICE])

    def replica_fn(x):
        context = keras_dist.get_replica_context()
        return context.all_reduce("SUM", keras.ops.sum(x)), context.devices

    (x, _), *_ = batches()
    value = next(iter(strategy.experimental_distribute_dataset([x])))
    total, devices = strategy.run(replica_fn, (value,))
    assert [str(each) for each in devices] == [places.DEVICE]
    assert float(models.to_numpy(total)) == pytest.approx(x.sum(), rel=1e-4)
