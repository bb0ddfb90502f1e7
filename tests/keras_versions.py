"""What differs between the versions of Keras that tests run with."""

import keras
import pytest
from packaging.version import Version

excludes_when_built = pytest.mark.skipif(
    Version(keras.__version__) >= Version("3.16.0.dev0"),
    reason="From Keras 3.16, an optimizer that is built refuses to exclude "
    "variables from weight decay.",
)
