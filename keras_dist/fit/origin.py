"""Warnings about plain models that were perhaps meant to be distributed.

A model that is loaded, unpickled or made from a configuration outside of any
scope belongs to no strategy: its data may come from another process. It
remembers its origin, and warns when it begins to train on one device. A plain
model that is used while a scope is open warns at once. Each warns once.
"""

import sys
import warnings
import weakref
from types import FrameType
from typing import Any

import keras

from keras_dist.core import context

SECTION = "A loop that is not distributed"
_ATTRIBUTE = "_keras_dist_origin"
# Models that have warned already.
told: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


class DistributedConfig(dict[str, Any]):
    """The configuration of a distributed model, from its `get_config`.

    Attributes:
        origin: String, the `repr` of the model's strategy.
    """

    def __init__(self, config: dict[str, Any], strategy: Any) -> None:
        super().__init__(config)
        self.origin = repr(strategy)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are plain dicts, as without keras_dist.
        return dict, (dict(self),)


def remember(model: keras.Model, origin: str) -> None:
    """Has a plain model warn when it is trained.

    `origin` is the `repr` of the strategy whose model it was made from.
    """
    object.__setattr__(model, _ATTRIBUTE, origin)


def forget(model: keras.Model) -> None:
    """Has a plain model train on one device without a warning."""
    vars(model).pop(_ATTRIBUTE, None)


def notice(model: keras.Model) -> None:
    """Warns, once, if a plain model came from a distributed one."""
    origin = vars(model).pop(_ATTRIBUTE, None)
    if origin is not None:
        warnings.warn(
            f"Model '{model.name}' trains on one device. Received: a model "
            "that was made, outside of any scope, from what was saved or "
            f"described of a model that {origin} distributed. Expected, to "
            "train it distributed too: make it inside of `with "
            "strategy.scope():`, or call `strategy.distribute(model)` before "
            "its first `fit`.",
            stacklevel=_users_level(),
        )


def notice_scope(model: keras.Model) -> None:
    """Warns, once, if a plain model is used where a scope is open."""
    if not context.in_cross_replica_context() or model in told:
        return
    strategy: Any = context.current_strategy()
    if strategy is None or strategy.plan.num_replicas == 1:
        return
    told.add(model)
    forget(model)
    warnings.warn(
        f"Model '{model.name}' runs on one device, though the scope of "
        f"{strategy!r} is open. Received: a model that was made outside of "
        "any scope. Expected, to distribute it: make it inside of `with "
        "strategy.scope():`, or call `strategy.distribute(model)` before its "
        "first `fit`. If one device is meant, use it outside of the scope. "
        f"See '{SECTION}' in tutorials/errors.md.",
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
