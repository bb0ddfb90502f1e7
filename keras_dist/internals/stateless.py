"""Opening a `StatelessScope` for a while."""

import contextlib
from collections.abc import Iterator

import keras

from keras_dist.internals import keras_internals


@contextlib.contextmanager
def opened(scope: keras.StatelessScope | None) -> Iterator[None]:
    """Makes a scope, or none, this thread's inside the context."""
    before = keras_internals.set_stateless_scope(scope)
    try:
        yield
    finally:
        keras_internals.set_stateless_scope(before)
