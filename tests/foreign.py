"""What Keras, the framework, `warnings` and the classes of a program are."""

import gc
import sys
import types
import warnings

import keras

_ABSENT = object()
# PyTorch sets it around each operation of its own, and two threads at once may
# leave the one's function there.
_CHANGES_BY_ITSELF = ("torch._library.fake_impl", "global_ctx_getter")


def attributes(*own):
    """Returns all attributes of foreign modules and classes, by their place.

    They are those of Keras, of the framework and of the modules named `own`.
    Of what changes by itself, such as counts and caches, nothing is returned,
    but everything of `warnings`.
    """
    roots = ("keras", keras.backend.backend(), *own)
    found = {("warnings", name): v for name, v in vars(warnings).items()}
    found["warnings", "filters"] = tuple(warnings.filters)
    for name, module in list(sys.modules.items()):
        if _is_of(name, roots) and type(module) is types.ModuleType:
            found |= _of(name, module)
    for cls in gc.get_objects():
        if isinstance(cls, type):
            module = vars(cls).get("__module__")
            if isinstance(module, str) and _is_of(module, roots):
                found |= _of(f"{name_of(cls)} {id(cls)}", cls)
    found.pop(_CHANGES_BY_ITSELF, None)
    return found


def differences(before, after):
    """Returns the places of what was replaced, added or taken away.

    A module or a class that is new, or is gone, is none.
    """
    both = {place for place, _ in before} & {place for place, _ in after}
    return sorted(
        f"{place.split()[0]}.{name}"
        for place, name in before.keys() | after.keys()
        if place in both
        and before.get((place, name), _ABSENT)
        is not after.get((place, name), _ABSENT)
        and before.get((place, name)) != after.get((place, name))
    )


def name_of(owner):
    """Returns the name of a module or class in places."""
    is_class = isinstance(owner, type)
    return (
        f"{owner.__module__}.{owner.__qualname__}"
        if is_class
        else getattr(owner, "__name__", "")
    )


def _is_of(name, roots):
    return name.split(".")[0] in roots


def _of(place, owner):
    return {
        (place, name): value
        for name, value in list(vars(owner).items())
        if callable(value) or hasattr(type(value), "__get__")
    }
