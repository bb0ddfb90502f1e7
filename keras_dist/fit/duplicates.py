"""Copies of what a strategy distributes, and the strategy they belong to.

A copy that is made in this process, by `copy.deepcopy` or
`keras.models.clone_model`, belongs to the strategy of its original. One that
is made from data tells where it comes from: see `origin`.
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

# In the configuration that a file or a pickle has.
_KEY = "keras_dist_origin"


@functools.cache
def install() -> None:
    """Has Keras tell copies from other new objects from now on."""
    keras_internals.hook_cloning(_in_scope)
    keras_internals.hook_files(_writes_origin, _reads_origin)
    keras_internals.Saveable.__deepcopy__ = _in_scope(_deepcopy)
    for cls in (keras.Model, keras.Sequential):
        original = vars(cls)["from_config"].__func__
        cls.from_config = classmethod(_remembers(original))


def strategy_of(thing: Any) -> Any:
    """The strategy that a model, layer, optimizer or metric belongs to.

    Returns:
        A `Strategy`, or `None`.
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
    """Wraps a function that copies its first argument.

    Under a scope that is open already, a copy belongs to that strategy.
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
    """What `copy.deepcopy` does with an object that says how to pickle it."""
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
    """Wraps what gives the JSON of a model's configuration, and more."""

    @functools.wraps(serialize)
    def wrapped(model: Any) -> Any:
        config, *rest = serialize(model)
        strategy = strategy_of(model)
        if strategy is not None and not strategy.plan.is_one_device:
            config = json.dumps({**json.loads(config), _KEY: repr(strategy)})
        return config, *rest

    return wrapped


def _reads_origin(deserialize: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what makes a model of the JSON of its configuration."""

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
