"""What differs between the versions of Keras that tests run with."""

import keras
import pytest
from packaging.version import Version

_version = Version(keras.__version__)
_backend = keras.backend.backend()

# Keras 3.14 takes a batch of the data ahead of the step, also on the CPU.
READS_AHEAD = _backend == "jax" and _version < Version("3.15.0")

has_distributions = pytest.mark.skipif(
    _backend != "jax" and _version < Version("3.15.0"),
    reason="Before Keras 3.15, `keras.distribution` works on JAX only.",
)
excludes_when_built = pytest.mark.skipif(
    _version >= Version("3.16.0.dev0"),
    reason="From Keras 3.16, an optimizer that is built refuses to exclude "
    "variables from weight decay.",
)
