"""What differs between the versions of Keras that tests run with."""

import functools

import keras
import pytest
from packaging.version import Version


def _may_exclude_when_built():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable([0.0], name="built")])
    try:
        optimizer.exclude_from_weight_decay(var_names=["built"])
    except ValueError:
        return False
    return True


_version = Version(keras.__version__)
_backend = keras.backend.backend()

# Keras 3.14 takes a batch of the data ahead of the step, also on the CPU.
READS_AHEAD = _backend == "jax" and _version < Version("3.15.0")

has_distributions = pytest.mark.skipif(
    _backend != "jax" and _version < Version("3.15.0"),
    reason="Before Keras 3.15, `keras.distribution` works on JAX only.",
)
excludes_when_built = pytest.mark.skipif(
    not _may_exclude_when_built(),
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
