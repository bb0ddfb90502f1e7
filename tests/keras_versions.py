"""What differs between the versions of Keras that tests run with.

By their numbers: workers import this before they may use a device.
"""

import keras
import pytest
from packaging.version import Version

_backend = keras.backend.backend()
_version = Version(keras.__version__)
_is_3_14 = _version < Version("3.15.0")
_is_3_16 = _version >= Version("3.16.0.dev0")

# Keras 3.14 takes a batch of the data ahead of the step, also on the CPU.
READS_AHEAD = _backend == "jax" and _is_3_14
# On TensorFlow, a step that finds no more data counts in plain Keras' mean of
# an output's loss, as one more step with a loss of 0.
COUNTS_THE_END = _backend == "tensorflow" and not _is_3_16
# Keras 3.14's `train_on_batch` does not set metrics to zero.
RESETS_METRICS = not _is_3_14
# Whether a model may have several steps in one execution.
TAKES_SEVERAL_STEPS = _backend != "torch" or _is_3_16

has_distributions = pytest.mark.skipif(
    _backend != "jax" and _is_3_14,
    reason="Before Keras 3.15, `keras.distribution` works on JAX only.",
)
excludes_when_built = pytest.mark.skipif(
    _is_3_16,
    reason="From Keras 3.16, an optimizer that is built refuses to exclude "
    "variables from weight decay.",
)
several_steps = pytest.mark.skipif(
    not TAKES_SEVERAL_STEPS,
    reason="Before 3.16, Keras has no steps_per_execution on PyTorch.",
)
