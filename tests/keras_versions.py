"""What differs between the versions of Keras that tests run with."""

import functools

import keras
import pytest
from packaging.version import Version

excludes_when_built = pytest.mark.skipif(
    Version(keras.__version__) >= Version("3.16.0.dev0"),
    reason="From Keras 3.16, an optimizer that is built refuses to exclude "
    "variables from weight decay.",
)


@functools.cache
def takes_several_steps():
    """Returns whether a model may have several steps in one execution.

    On PyTorch, models may from Keras 3.16.
    """
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, name="of_several_steps")],
        name="several_steps",
    )
    model.compile("sgd", "mse", steps_per_execution=2)
    try:
        model.make_train_function()
    except ValueError:
        return False
    return True


several_steps = pytest.mark.skipif(
    not takes_several_steps(),
    reason="Before 3.16, Keras has no steps_per_execution on PyTorch.",
)
