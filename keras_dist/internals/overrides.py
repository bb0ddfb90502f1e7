"""Wraps methods of Keras' classes that users' subclasses override."""

from collections.abc import Callable
from typing import Any

import keras

# The attribute that marks a wrapped method.
_HOOKED = "_keras_dist_hooked"


def hook_overrides(
    base: Any, name: str, hook: Callable[[Any], Callable[..., Any]]
) -> None:
    """Wraps a method wherever subclasses outside of Keras define their own.

    That holds for existing subclasses and for those that are made later. `hook`
    returns the replacement of a subclass' own method.
    """

    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        hook_override(cls, name, hook)

    base.__init_subclass__ = classmethod(__init_subclass__)
    classes: list[Any] = base.__subclasses__()
    while classes:
        cls = classes.pop()
        hook_override(cls, name, hook)
        classes += cls.__subclasses__()


def overrides(cls: type, name: str) -> bool:
    """Returns whether a class has a method that is not Keras' own."""
    method = getattr(cls, name)
    return (method.__module__ or "").split(".")[0] != "keras"


def own_steps(model: keras.Model) -> list[str]:
    """Returns the methods of a training step that a model's class overrides."""
    return [
        name
        for name in ("train_step", "compute_loss")
        if overrides(type(model), name)
    ]


def hook_override(cls: Any, name: str, hook: Callable[[Any], Any]) -> None:
    """Wraps a class' method, once, if it is not Keras' own."""
    original = getattr(cls, name)
    if not overrides(cls, name) or hasattr(original, _HOOKED):
        return
    hooked = hook(original)
    setattr(hooked, _HOOKED, True)
    setattr(cls, name, hooked)
