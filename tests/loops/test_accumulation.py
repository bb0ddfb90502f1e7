"""Gradients that loops accumulate by hand add up as on one device."""

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
