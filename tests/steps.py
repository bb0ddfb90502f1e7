"""Steps of training as users write them, with `value_and_grad`."""

import keras

import keras_dist


def train_step(model, optimizer, losses_of, first=0, **options):
    """A replica function that trains a model.

    Args:
        model: The model.
        optimizer: Its optimizer.
        losses_of: Callable from a batch to the losses of its rows.
        first: Integer, of the trainable variables the first one to train.
        **options: Those of `compute_average_loss`.
    """

    def step(*batch):
        variables = model.trainable_variables[first:]

        def loss_fn():
            losses = losses_of(*batch)
            loss = keras_dist.compute_average_loss(losses, **options)
            return optimizer.scale_loss(loss)

        loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
        optimizer.apply(gradients, variables)
        return loss

    return step


def classifier_step(model, optimizer, **options):
    """One that trains a model that returns logits."""

    def losses_of(x, y):
        return keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )

    return train_step(model, optimizer, losses_of, **options)
