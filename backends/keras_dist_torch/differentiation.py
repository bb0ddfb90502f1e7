"""Gradients of functions by autograd, nested ones included."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_dist.plugin.front_end import keras_hooks
from keras_dist.replica.differentiation import Differentiated
from keras_dist.replica.scopes import Overlay


class _Current(threading.local):
    depth = 0


_current = _Current()


def differentiate(
    fn: Callable[..., tuple[Any, Any]],
    variables: Sequence[keras.Variable],
    tensors: Sequence[Any],
) -> Differentiated:
    """Implements `Differentiates.differentiate`."""
    is_nested = _current.depth > 0
    with torch.enable_grad(), _deeper():
        # New tensors: `fn` may use the caller's through a closure, and those
        # uses are not differentiated.
        own = [_argument(tensor) for tensor in tensors]
        leaves, overlay = _leaves(variables)
        with overlay:
            value, aux = fn(*own)
        gradients = _gradients(value, [*leaves, *own], is_nested)
    if not is_nested:
        # No derivative of these will be asked for: free their graphs.
        value, aux = keras.tree.map_structure(_detached, (value, aux))
    return value, aux, gradients


@contextlib.contextmanager
def _deeper() -> Iterator[None]:
    _current.depth += 1
    try:
        yield
    finally:
        _current.depth -= 1


def _argument(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


def _leaves(
    variables: Sequence[keras.Variable],
) -> tuple[list[torch.Tensor], contextlib.AbstractContextManager[Any]]:
    """Returns leaves of autograd for variables, and a scope that reads them."""
    leaves = [variable.value for variable in variables]
    overlaid = []
    for index, variable in enumerate(variables):
        if not leaves[index].requires_grad:
            # A copy, because `fn` may assign the variable.
            leaves[index] = leaves[index].detach().clone().requires_grad_()
            overlaid.append((variable, leaves[index]))
    if not overlaid:
        return leaves, contextlib.nullcontext()
    return leaves, _overlay(overlaid)


@contextlib.contextmanager
def _overlay(overlaid: list[Any]) -> Iterator[None]:
    hooks = keras_hooks()
    hooks.install_for_functions()
    overlay = Overlay(overlaid)
    try:
        with hooks.creating(), overlay:
            yield
    finally:
        overlay.release()


def _gradients(
    value: torch.Tensor, sources: list[torch.Tensor], is_nested: bool
) -> list[Any]:
    if not value.requires_grad:
        return [None] * len(sources)
    return list(
        torch.autograd.grad(
            value, sources, allow_unused=True, create_graph=is_nested
        )
    )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
