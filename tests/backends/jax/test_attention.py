"""A step that TPUs run together has plain attention; others have the kernel."""

import keras
import numpy as np
import pytest

from keras_dist.errors import UnsupportedModelError
from keras_dist_jax import keras_internals

Q = np.random.default_rng(0).normal(size=(2, 8, 1, 16)).astype("float32")


def attention(flash_attention):
    return keras.ops.dot_product_attention(
        Q, Q, Q, flash_attention=flash_attention
    )


def test_a_divided_step_has_plain_attention(monkeypatch):
    asked = []

    def can_use(*args, raise_error=False):
        asked.append(raise_error)
        return False

    hooked = keras_internals.hook_attention(can_use)
    monkeypatch.setattr(keras_internals.nn, "_can_use_flash_attention", hooked)
    divided = keras_internals.with_divided_attention(attention)
    np.testing.assert_allclose(divided(None), attention(False), rtol=1e-6)
    with pytest.raises(UnsupportedModelError, match="flash_attention=True"):
        divided(True)
    assert not asked
    # Other steps ask Keras, after an error too.
    attention(None)
    assert asked == [False]
