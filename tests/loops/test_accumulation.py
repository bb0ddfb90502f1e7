"""Gradients that are accumulated by hand, over batches."""

import keras
from keras import ops

import keras_dist
from loops.helpers import X
from loops.helpers import Y
from loops.helpers import adam
from loops.helpers import assert_same_numbers
from loops.helpers import batches
from loops.helpers import crossentropy
from loops.helpers import function
from loops.helpers import mlp
from loops.helpers import outcome
from loops.helpers import replicas
from loops.helpers import run


def counted_in_python(strategy, compiled):
    """Two functions; each replica has sums of its own, until they are used."""
    with strategy.scope():
        model, optimizer = mlp(), adam()
        sums = [
            keras.Variable(
                ops.zeros(v.shape),
                trainable=False,
                aggregation="sum",
                synchronization="on_read",
            )
            for v in model.trainable_variables
        ]

    @function(compiled)
    def accumulate(x, y):
        def loss_fn():
            losses = crossentropy(y, model(x, training=True))
            return keras_dist.compute_average_loss(losses, global_batch_size=8)

        loss, grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        for own, grad in zip(sums, grads, strict=True):
            own.assign_add(grad)
        return loss

    @function(compiled)
    def update():
        optimizer.apply([own + 0.0 for own in sums], model.trainable_variables)
        for own in sums:
            own.assign(ops.zeros(own.shape))

    losses = []
    for index, batch in enumerate(batches(strategy, X, Y)):
        losses.append(run(strategy, accumulate, batch))
        if index % 2:
            strategy.run(update)
    return outcome(losses=losses, model=model, optimizer=optimizer)


@replicas
def test_accumulation_that_is_counted_in_python(num_replicas):
    assert_same_numbers(counted_in_python, num_replicas, total=18.63476)


def counted_in_a_variable(strategy, compiled):
    """One function that decides itself whether to use the sums."""
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.SGD(0.1)
        # A sum over replicas in each step, the same on all of them.
        sums = [
            keras.Variable(
                ops.zeros(v.shape), trainable=False, aggregation="sum"
            )
            for v in model.trainable_variables
        ]
        count = keras.Variable(0, trainable=False, dtype="int32")

    @function(compiled)
    def train_step(x, y):
        replicas = keras_dist.get_replica_context().num_replicas_in_sync

        def loss_fn():
            losses = crossentropy(y, model(x, training=True))
            return keras_dist.compute_average_loss(losses, global_batch_size=8)

        loss, grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        for own, grad in zip(sums, grads, strict=True):
            own.assign_add(grad)
        count.assign_add(1)
        found = ops.cond(
            ops.equal(count % 2, 0),
            lambda: [own / replicas for own in sums],
            lambda: [ops.zeros(own.shape) for own in sums],
        )
        optimizer.apply(found, model.trainable_variables)
        keep = ops.cast(ops.not_equal(count % 2, 0), "float32") / replicas
        for own in sums:
            own.assign(own * keep)
        return loss

    losses = [
        run(strategy, train_step, batch) for batch in batches(strategy, X, Y)
    ]
    return outcome(losses=losses, counts=[count], model=model)


@replicas
def test_accumulation_that_is_counted_in_a_variable(num_replicas):
    assert_same_numbers(counted_in_a_variable, num_replicas, total=22.57250)
