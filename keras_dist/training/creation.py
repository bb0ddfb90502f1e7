"""Noticing what is made under a scope: models and variables.

While at least one scope is open, in any thread, `keras.Model.__init__` and
`keras.Variable.__init__` are wrapped. Each call looks up the strategy of its
own thread, so other threads are not affected.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist import context
from keras_dist.training.binding import bind_model
from keras_dist.training.binding import claim_variable

_lock = threading.Lock()
_open_scopes = 0
_undo = contextlib.ExitStack()


@contextlib.contextmanager
def creation_hooks() -> Iterator[None]:
    """Installs the hooks for the first scope, removes them with the last."""
    global _open_scopes
    with _lock:
        if _open_scopes == 0:
            _undo.enter_context(_wrapped(keras.Model, _on_model))
            _undo.enter_context(_wrapped(keras.Variable, _on_variable))
        _open_scopes += 1
    try:
        yield
    finally:
        with _lock:
            _open_scopes -= 1
            if _open_scopes == 0:
                _undo.close()


def _on_model(model: keras.Model) -> None:
    strategy = context.current_strategy()
    if strategy is not None and context.in_cross_replica_context():
        bind_model(model, strategy)


def _on_variable(variable: keras.Variable) -> None:
    strategy = context.current_strategy()
    if strategy is not None and context.in_cross_replica_context():
        claim_variable(variable, strategy)


@contextlib.contextmanager
def _wrapped(cls: Any, after: Callable[[Any], None]) -> Iterator[None]:
    inherited = "__init__" not in vars(cls)
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self)

    cls.__init__ = __init__
    try:
        yield
    finally:
        if inherited:
            del cls.__init__
        else:
            cls.__init__ = original
