"""Methods of Keras' classes that users' subclasses write anew."""

from collections.abc import Callable
from typing import Any

import keras

# On a method that is wrapped already.
_HOOKED = "_keras_dist_hooked"


def hook_overrides(
    base: Any, name: str, hook: Callable[[Any], Callable[..., Any]]
) -> None:
    """Wraps a method wherever subclasses outside of Keras define their own.

    Subclasses that there are, and those that will be made.

    Args:
        base: The class of Keras.
        name: String, the method.
        hook: Callable from the subclass' own method to what takes its place.
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
    """Whether a class has a method that is not as Keras wrote it.

    Args:
        cls: A class.
        name: String, the method.
    """
    method = getattr(cls, name)
    return (method.__module__ or "").split(".")[0] != "keras"


def own_steps(model: keras.Model) -> list[str]:
    """The methods of a training step that a model's class wrote anew.

    Args:
        model: A `keras.Model`.
    """
    return [
        name
        for name in ("train_step", "compute_loss")
        if overrides(type(model), name)
    ]


def hook_override(cls: Any, name: str, hook: Callable[[Any], Any]) -> None:
    """Wraps a class' method if it is not as Keras wrote it, once.

    Args:
        cls: A class.
        name: String, the method.
        hook: Callable from that method to what takes its place.
    """
    original = getattr(cls, name)
    if not overrides(cls, name) or hasattr(original, _HOOKED):
        return
    hooked = hook(original)
    setattr(hooked, _HOOKED, True)
    setattr(cls, name, hooked)
