"""The loop of a classifier trains as on one device, also on partial batches."""

import functools

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from loops.helpers import X
from loops.helpers import Y
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import function
from loops.helpers import gathered
from loops.helpers import minimize
from loops.helpers import mirrored
from loops.helpers import mlp
from loops.helpers import on_one_device
from loops.helpers import outcome
from loops.helpers import outcome_of
from loops.helpers import replicas
from loops.helpers import run
from loops.helpers import uniform
from parity.harness import assert_same
from parity.harness import to_numpy

# The last batch has fewer rows than there are replicas.
SIZES = (8, 8, 5, 1)
PARTIAL = (8, 5)
WEIGHTS = uniform(1)


def averaging():
    return keras.optimizers.RMSprop(0.01, use_ema=True)


def made(
    strategy, compiled, global_batch=None, dropout=0.0, make_optimizer=adam
):
    """The parts of the loop: a model, optimizer and metric, and its step."""
    with strategy.scope():
        model = keras.Sequential([mlp(), keras.layers.Dropout(dropout, seed=5)])
        optimizer = make_optimizer()
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    @function(compiled)
    def train_step(x, y):
        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return keras_dist.compute_average_loss(
                crossentropy(y, logits), global_batch_size=global_batch
            )

        return minimize(loss_fn, model, optimizer)

    return model, optimizer, accuracy, train_step


def classifier(strategy, compiled, global_batch=None):
    model, optimizer, accuracy, step = made(strategy, compiled, global_batch)
    losses, accuracies = [], []
    for _ in range(2):
        for batch in batches(strategy, X, Y, sizes=SIZES):
            losses.append(run(strategy, step, batch))
        accuracies.append(to_numpy(accuracy.result()))
        accuracy.reset_state()
    return outcome(
        losses=losses, accuracies=accuracies, model=model, optimizer=optimizer
    )


@contract(216, native=False)
@replicas
def test_classifier(num_replicas):
    assert_same_numbers(classifier, num_replicas, total=23.97502)


fixed_batch = functools.partial(classifier, global_batch=8)


def test_classifier_whose_batches_all_count_as_full():
    assert_same_numbers(fixed_batch, 2, total=21.48446)


def evaluation(strategy, compiled):
    """Forward passes only: metrics, and predictions in the order of rows."""
    with strategy.scope():
        model = mlp()
        mean = keras.metrics.Mean()
        auc = keras.metrics.AUC(num_thresholds=20)

    @function(compiled)
    def test_step(x, y, weights):
        logits = model(x, training=False)
        mean.update_state(crossentropy(y, logits), sample_weight=weights)
        auc.update_state(
            keras.ops.one_hot(y, 3), keras.ops.softmax(logits), weights[:, None]
        )

    @function(compiled)
    def predict_step(x):
        return keras.ops.softmax(model(x, training=False))

    results, rows = [], []
    for _ in range(2):
        for x, y, w in batches(strategy, X, Y, WEIGHTS, sizes=PARTIAL):
            strategy.run(test_step, args=(x, y, w))
            rows.append(gathered(strategy, strategy.run(predict_step, (x,))))
        for metric in (mean, auc):
            results.append(to_numpy(metric.result()))
            metric.reset_state()
    return outcome(results=results, rows=rows)


@replicas
def test_evaluation(num_replicas):
    assert_same_numbers(evaluation, num_replicas, total=29.19642)
    model = mlp()
    predicted = keras.ops.softmax(model(X[:13]))
    rows = on_one_device(evaluation)
    in_order = np.concatenate([rows["rows/0"], rows["rows/1"]])
    assert_same({"rows": in_order}, {"rows": to_numpy(predicted)})


def unrolled(strategy, compiled, steps=1):
    """Several steps in a call, if told to."""
    model, optimizer, accuracy, step = made(
        strategy, compiled, dropout=0.3, make_optimizer=averaging
    )
    data = batches(strategy, X, Y, sizes=(4, 4, 4, 4, 3))
    losses = []
    if steps == 1:
        losses += [run(strategy, step, batch) for batch in data]
    else:
        iterator = iter(data)
        for _ in range(2):
            stacked = keras_dist.scan_steps(step, iterator, steps)
            losses += list(to_numpy(strategy.reduce("SUM", stacked, axis=None)))
    return outcome(
        losses=losses,
        accuracy=[accuracy.result()],
        model=model,
        optimizer=optimizer,
    )


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_several_steps_in_a_call_are_single_steps_dropout_included(
    num_replicas,
):
    several = functools.partial(unrolled, steps=3)
    assert_same(
        outcome_of(several, mirrored(num_replicas), True),
        outcome_of(unrolled, mirrored(num_replicas), True),
    )
