"""Refuses models that each of several workers would train alone."""

import contextlib
import contextvars
import functools
import os
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.cluster_resolver.detection import place
from keras_dist.cluster_resolver.environment import WORKERS
from keras_dist.errors import StrategyMismatchError
from keras_dist.fit.binding import binding_of
from keras_dist.fit.origin import told
from keras_dist.internals.keras_internals import Trainer
from keras_dist.plugin.workers import has_joined
from keras_dist.plugin.workers import is_independent

_TRAINING = ("fit", "train_on_batch")
_on_purpose = contextvars.ContextVar("keras_dist_trains_alone", default=False)


def watch_training() -> None:
    """Checks each model that begins to train, if a launcher started workers.

    Called when keras_dist is imported and when a strategy is made: a script may
    set the variables of its cluster between the two.
    """
    found = place()
    if found is not None and found[0].number > 1:
        _install()


@contextlib.contextmanager
def alone_on_purpose() -> Iterator[None]:
    """Allows each worker to train models of its own inside the context."""
    token = _on_purpose.set(True)
    try:
        yield
    finally:
        _on_purpose.reset(token)


@functools.cache
def _install() -> None:
    for name in _TRAINING:
        setattr(Trainer, name, _checked(getattr(Trainer, name), name))


def _checked(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        binding = binding_of(self)
        strategy = None if binding is None else binding.strategy
        if strategy is None or strategy.executor.workers is None:
            _check(self, strategy, name)
        return original(self, *args, **kwargs)

    return method


def _check(model: keras.Model, strategy: Any, method: str) -> None:
    """Refuses to train a model that other workers don't train.

    Raises:
        StrategyMismatchError: If `keras-dist run` started this worker. With
            other launchers there is a warning instead, once for each model.
    """
    found = None if _on_purpose.get() or is_independent() else place()
    if found is None or found[0].number == 1 or _is_deliberate(strategy):
        return
    if strategy is None and keras.distribution.distribution() is not None:
        return  # Keras distributes it, over processes too.
    if strategy is None:
        what = "a model that was made before, or outside of, any scope"
        mend = (
            "Make the model, its layers and its optimizer inside of that "
            "scope, or adopt the model with `strategy.distribute(model)`."
        )
    else:
        what = f"a model of {strategy!r}, which knows no other worker"
        mend = (
            "Use `MultiWorkerMirroredStrategy` in place of "
            f"`{type(strategy).__name__}`."
        )
    where, known_by = found
    message = (
        f"`{method}` of model '{model.name}' would train it on this worker "
        f"alone. Received: {what}, in a process of several workers "
        f"({known_by}: {where}). Expected: a model made under "
        f"`keras_dist.MultiWorkerMirroredStrategy().scope()`. {mend} Where "
        "each worker is to train alone, say so: `keras-dist run "
        "--independent`, or KERAS_DIST_INDEPENDENT=1."
    )
    if os.environ.get(WORKERS):
        raise StrategyMismatchError(message)
    if model not in told:
        told.add(model)
        warnings.warn(message, stacklevel=3)


def _is_deliberate(strategy: Any) -> bool:
    """Returns whether a worker in a cluster asked for one device on purpose."""
    return has_joined() and strategy is not None and strategy.names_its_device
