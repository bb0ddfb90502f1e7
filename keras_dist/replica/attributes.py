"""Restores the Python attributes of a layer after a call of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras


@contextlib.contextmanager
def kept_attributes(layer: keras.Layer) -> Iterator[None]:
    """Restores attributes of a layer and its sublayers when the context ends.

    A call of a layer often leaves tensors in them (`self.z_mean = ...`) that a
    loss reads later.
    """
    before = [(vars(x), _copy(vars(x))) for x in layer._flatten_layers()]
    try:
        yield
    finally:
        for attributes, (values, contents) in before:
            attributes.clear()
            attributes.update(values)
            for container, content in contents:
                _restore(container, content)


# Pairs of a list, dict or set and a copy of it.
_Contents = list[tuple[Any, Any]]


def _copy(attributes: dict[str, Any]) -> tuple[dict[str, Any], _Contents]:
    contents: _Contents = [
        (value, kind(value))
        for value in attributes.values()
        for kind in (list, dict, set)
        if isinstance(value, kind)
    ]
    return dict(attributes), contents


def _restore(container: Any, content: Any) -> None:
    """Restores a container's content without Keras' tracking of changes."""
    if isinstance(container, list):
        if not _are_same(container, content):
            list.__setitem__(container, slice(None), content)
        return
    if isinstance(container, dict) and _are_same(
        container.values(), content.values()
    ):
        return
    kind = dict if isinstance(container, dict) else set
    kind.clear(container)
    kind.update(container, content)


def _are_same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(
        one is other for one, other in zip(ones, others, strict=True)
    )
