"""Nothing outlives a call that the caller does not hold."""

import gc
import weakref

import keras
import numpy as np
import pytest

import keras_dist
from gradients.helpers import strategy_of


class Kept:
    """Something that `fn` closes over."""


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _call(model, x):
    thing = Kept()

    def fn():
        value = keras.ops.mean(model(x, training=True))
        return value, (thing, model.losses)

    (_, aux), grads = keras_dist.value_and_grad(
        fn, model.trainable_variables, has_aux=True
    )
    assert aux[0] is thing and len(grads) == 4
    return weakref.ref(thing)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("num_replicas", [None, 1, 2])
def test_the_function_is_let_go_without_a_collection(num_replicas):
    strategy = strategy_of(num_replicas or 1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(2, activity_regularizer="l2"),
                keras.layers.BatchNormalization(),
            ]
        )
    x = np.ones((4, 3), "float32")
    references = []

    def replica_fn():
        references.append(_call(model, x))

    for _ in range(2):
        if num_replicas is None:
            replica_fn()
        else:
            strategy.run(replica_fn)
    assert [reference() for reference in references] == [None] * len(references)
