"""A step of training, in each backend's own words, as guides have it."""

import keras

BACKEND = keras.backend.backend()


def gradients(loss_fn, variables):
    """Calls `loss_fn`, and differentiates the first thing it returns.

    Returns:
        Tuple of what it returned, and the gradients.
    """
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            results = loss_fn()
        return results, tape.gradient(results[0], variables)
    if BACKEND == "torch":
        import torch

        results = loss_fn()
        return results, list(
            torch.autograd.grad(
                results[0],
                [v.value for v in variables],
                allow_unused=True,
            )
        )
    import keras_dist

    (loss, rest), slopes = keras_dist.value_and_grad(
        lambda: _first_and_rest(loss_fn()), variables, has_aux=True
    )
    return (loss, *rest), slopes


def descend(model, optimizer, loss_fn, variables):
    """Calls `loss_fn` and lets an optimizer make its first result less."""
    if BACKEND == "torch":
        import torch

        model.zero_grad()
        results = loss_fn()
        results[0].backward()
        slopes = [v.value.grad for v in variables]
        with torch.no_grad():
            optimizer.apply(slopes, variables)
        return results
    results, slopes = gradients(loss_fn, variables)
    optimizer.apply(slopes, variables)
    return results


def _first_and_rest(results):
    return results[0], tuple(results[1:])
