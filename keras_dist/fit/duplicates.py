"""Keeps copies of distributed models and other objects under their strategy.

A copy that is made in this process, by `copy.deepcopy` or
`keras.models.clone_model`, belongs to the strategy of its original. A copy that
is made from data remembers its origin: see `origin`.
"""

import contextlib
import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.fit import origin
from keras_dist.fit.binding import binding_of
from keras_dist.internals import keras_internals

# The key of the origin in the configuration that files and pickles hold.
_KEY = "keras_dist_origin"


@functools.cache
def install() -> None:
    """Hooks Keras' copying, cloning, saving and loading for good."""
    keras_internals.hook_cloning(_in_scope)
    keras_internals.hook_files(_writes_origin, _reads_origin)
    keras_internals.Saveable.__deepcopy__ = _in_scope(_deepcopy)
    for cls in (keras.Model, keras.Sequential):
        original = vars(cls)["from_config"].__func__
        cls.from_config = classmethod(_remembers(original))


def strategy_of(thing: Any) -> Any:
    """Returns the strategy that a model, layer, optimizer or metric belongs to.

    `None` if it belongs to none.
    """
    is_trained = isinstance(thing, keras_internals.Trainer)
    binding = binding_of(thing) if is_trained else None
    if binding is not None:
        return binding.strategy
    for variable in getattr(thing, "variables", ()):
        owner = vars(variable).get("distribute_strategy")
        if owner is not None:
            return owner
    return None


def _in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a copying function, so that a copy joins its original's strategy.

    The original is the function's first argument. Under a scope that is open
    already, a copy belongs to that scope's strategy.
    """

    @functools.wraps(method)
    def wrapped(original: Any, *args: Any, **kwargs: Any) -> Any:
        is_outside = not (
            context.has_strategy() or context.in_replica_function()
        )
        strategy = strategy_of(original) if is_outside else None
        with strategy.scope() if strategy else contextlib.nullcontext():
            return method(original, *args, **kwargs)

    return wrapped


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Copies an object by `__reduce_ex__`, as `copy.deepcopy` does."""
    reconstruct = copy._reconstruct  # type: ignore[attr-defined]
    return reconstruct(self, memo, *self.__reduce_ex__(4))


def _remembers(from_config: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_config)
    def wrapped(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        model = from_config(cls, config, *args, **kwargs)
        if isinstance(config, origin.DistributedConfig):
            _remember(model, config.origin)
        return model

    return wrapped


def _writes_origin(serialize: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that returns a model's configuration as JSON first."""

    @functools.wraps(serialize)
    def wrapped(model: Any) -> Any:
        config, *rest = serialize(model)
        strategy = strategy_of(model)
        if strategy is not None and not strategy.plan.is_one_device:
            config = json.dumps({**json.loads(config), _KEY: repr(strategy)})
        return config, *rest

    return wrapped


def _reads_origin(deserialize: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes a model from a configuration in JSON."""

    @functools.wraps(deserialize)
    def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
        model = deserialize(config, *args, **kwargs)
        source = json.loads(config).get(_KEY)
        if source is not None:
            _remember(model, source)
        return model

    return wrapped


def _remember(model: Any, source: str) -> None:
    is_trained = isinstance(model, keras_internals.Trainer)
    if is_trained and binding_of(model) is None:
        origin.remember(model, source)
