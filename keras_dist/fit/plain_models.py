"""Warnings about plain models that were perhaps meant to be distributed.

A plain model that came from a distributed one's configuration remembers it, and
warns when it begins to train. One that several workers would train alone is
refused. Copies in this process join the strategy of their original.
"""

import contextlib
import copy
import functools
import json
import os
import sys
import warnings
import weakref
from types import FrameType
from typing import Any

import keras

from keras_dist.cluster_resolver.detection import place
from keras_dist.cluster_resolver.launched import WORKERS
from keras_dist.core import context
from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import see_section
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_internals import Trainer
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.membership import has_joined
from keras_dist.plugin.membership import is_alone_on_purpose
from keras_dist.plugin.membership import is_independent

_ATTRIBUTE = "_keras_dist_origin"
# Models that have warned already.
warned: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
# The key of the origin in the configuration that files and pickles hold.
_KEY = "keras_dist_origin"


class DistributedConfig(dict[str, Any]):
    """A distributed model's configuration, with the `repr` of its strategy."""

    def __init__(self, config: dict[str, Any], strategy: object) -> None:
        super().__init__(config)
        self.origin = repr(strategy)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are plain dicts, as without keras_dist.
        return dict, (dict(self),)


def forget(model: keras.Model) -> None:
    """Has a plain model train on one device without a warning."""
    vars(model).pop(_ATTRIBUTE, None)


def notice(model: keras.Model) -> None:
    """Warns, once, if a plain model came from a distributed one."""
    origin = vars(model).pop(_ATTRIBUTE, None)
    if origin is not None:
        warnings.warn(
            f"Model '{model.name}' trains on one device.\nReceived: a model "
            "that was made outside of any scope, from a saved file or a "
            f"configuration of a model that {origin} distributed. Expected: a "
            "distributed model, if it should train on several devices. Make "
            "it inside of `with strategy.scope():`, or call "
            "`strategy.distribute(model)` before its first `fit`.",
            stacklevel=_users_level(),
        )


def notice_scope(model: keras.Model) -> None:
    """Warns, once, if a plain model is used where a scope is open."""
    if not context.in_cross_replica_context() or model in warned:
        return
    strategy: Any = context.current_strategy()
    if strategy is None or strategy.plan.num_replicas == 1:
        return
    warned.add(model)
    forget(model)
    warnings.warn(
        f"Model '{model.name}' runs on one device, although the scope of "
        f"{strategy!r} is open.\nReceived: a model that was made outside of "
        "any scope. Expected: a distributed model, if it should run on "
        "several devices. Make it inside of `with strategy.scope():`, or "
        "call `strategy.distribute(model)` before its first `fit`. If it "
        "should run on one device, use it outside of the scope. "
        f"{see_section('A loop that is not distributed')}",
        stacklevel=_users_level(),
    )


def _users_level() -> int:
    """Returns the `stacklevel` at which a warning names the user's call."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.split(".")[0].startswith("keras")


def strategy_of(thing: object) -> Any:
    """Returns the strategy of a model or a part of one, or `None`."""
    binding = bound(thing) if isinstance(thing, Trainer) else None
    if binding is not None:
        return binding.strategy
    for variable in getattr(thing, "variables", ()):
        owner = vars(variable).get("distribute_strategy")
        if owner is not None:
            return owner
    return None


@as_hook
def hook_copying(method: Any, copied: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Stands for a copying function: a copy joins its original's strategy."""
    is_outside = not (context.has_strategy() or context.in_replica_function())
    strategy = strategy_of(copied) if is_outside else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        return method(copied, *args, **kwargs)


def hook_deepcopy(_: None) -> Any:
    """Returns what `copy.deepcopy` does without a method for it."""
    return hook_copying(_deepcopy)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    reconstruct = copy._reconstruct  # type: ignore[attr-defined]
    return reconstruct(self, memo, *self.__reduce_ex__(4))


def hook_from_config(original: Any) -> Any:
    """Has a model remember whose configuration it was made from."""
    from_config = original.__func__  # of a class method

    @functools.wraps(from_config)
    def method(cls: object, config: object, *args: Any, **kwargs: Any) -> Any:
        model = from_config(cls, config, *args, **kwargs)
        if isinstance(config, DistributedConfig):
            _remember(model, config.origin)
        return model

    return classmethod(method)


@as_hook
def hook_writing(serialize: Any, model: Any) -> Any:
    """Stands for what returns a model's configuration as JSON first."""
    config, *rest = serialize(model)
    strategy = strategy_of(model)
    if strategy is not None and not strategy.plan.is_one_device:
        config = json.dumps({**json.loads(config), _KEY: repr(strategy)})
    return config, *rest


@as_hook
def hook_reading(
    deserialize: Any, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands for what makes a model from a configuration in JSON."""
    model = deserialize(config, *args, **kwargs)
    source = json.loads(config).get(_KEY)
    if source is not None:
        _remember(model, source)
    return model


def _remember(model: keras.Model, source: str) -> None:
    """Has a plain model warn of its origin when it is trained."""
    if isinstance(model, Trainer) and bound(model) is None:
        object.__setattr__(model, _ATTRIBUTE, source)


def hook_training(
    name: str, original: Any, self: keras.Model, /, *args: Any, **kwargs: Any
) -> Any:
    """Stands for the methods that begin to train a model, in a worker."""
    binding = bound(self)
    strategy = None if binding is None else binding.strategy
    if strategy is None or strategy.executor.workers is None:
        _check(self, strategy, name)
    return original(self, *args, **kwargs)


def _check(model: keras.Model, strategy: Any, method: str) -> None:
    """Refuses, or warns of, training a model that other workers don't train."""
    detected = None if is_alone_on_purpose() or is_independent() else place()
    if detected is None or detected[0].number == 1:
        return
    if strategy is not None and strategy.names_its_device and has_joined():
        return  # A worker in a cluster asked for one device on purpose.
    if strategy is None and keras.distribution.distribution() is not None:
        return  # Keras distributes it, over processes too.
    if strategy is None:
        what = "a model that was made outside of any scope"
        mend = (
            "Make the model, its layers and its optimizer inside of that "
            "scope, or adopt the model with `strategy.distribute(model)`."
        )
    else:
        what = f"a model of {strategy!r}, which does not know the other workers"
        mend = (
            "Use `MultiWorkerMirroredStrategy` instead of "
            f"`{type(strategy).__name__}`."
        )
    where, known_by = detected
    message = (
        f"`{method}` of model '{model.name}' would train it on this worker "
        f"alone. Received: {what}, in a process that is one of several "
        f"workers ({known_by}: {where}). Expected: a model made under "
        f"`keras_dist.MultiWorkerMirroredStrategy().scope()`. {mend} If each "
        "worker should train alone, use `keras-dist run --independent`, or "
        "set KERAS_DIST_INDEPENDENT=1."
    )
    if os.environ.get(WORKERS):
        raise StrategyMismatchError(message)
    if model not in warned:
        warned.add(model)
        warnings.warn(message, stacklevel=4)
