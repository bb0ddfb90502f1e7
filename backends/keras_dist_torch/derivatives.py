"""Records of computed gradients, to notice if a step has changed them.

A step may do so in place or through `.data`, in the same tensors.
"""

import functools
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keras_dist.internals import keras_internals
from keras_dist.replica.gradients import hook_custom_gradient
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import current_step


@dataclass(frozen=True)
class _Seen:
    """A computed gradient's count of changes and sum of absolute values."""

    tensor: "weakref.ref[torch.Tensor]"
    version: int
    size: float

    def is_now(self, gradient: torch.Tensor) -> bool:
        """Returns whether a tensor in the same memory is unchanged."""
        tensor = self.tensor()
        # A change through `tensor.data` shows in the values only.
        return (
            tensor is not None
            and tensor._version == self.version
            and _size(gradient) == self.size
        )


class Derivatives:
    """The gradients that autograd gave a replica, none kept alive."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._is_changed = False

    def add(self, gradients: Iterable[Any]) -> None:
        """Records the current state of gradients."""
        for gradient in gradients:
            if _is_dense(gradient):
                self._seen[gradient.data_ptr()] = _Seen(
                    weakref.ref(gradient), gradient._version, _size(gradient)
                )

    def check(self, gradients: Iterable[Any]) -> None:
        """Notes changes of gradients before autograd adds to them."""
        self._is_changed |= not all(map(self._is_as_computed, gradients))

    def are_changed(self, gradients: Sequence[Any]) -> bool:
        """Returns whether some gradient is not recorded, or has changed."""
        if not self._seen:
            return False  # Without records, their origin is unknown.
        return self._is_changed or not all(map(self._is_as_computed, gradients))

    def _is_as_computed(self, gradient: Any) -> bool:
        if not _is_dense(gradient):
            return True
        seen = self._seen.get(gradient.data_ptr())
        if seen is not None and seen.is_now(gradient):
            return True
        # Steps may replace `None` with zeros, or start a sum from zeros.
        return not _size(gradient)


def install_derivatives() -> None:
    """Makes autograd record in replicas the gradients that it computes."""
    torch.autograd.grad = _remembered(torch.autograd.grad)
    torch.autograd.backward = _watched(torch.autograd.backward)
    core = keras_internals.backend_core
    core.custom_gradient = hook_custom_gradient(core.custom_gradient)


def _looking() -> ReplicaStep | None:
    step = current_step()
    return step if step is not None and step.looks_at_gradients else None


def _derivatives_of(step: ReplicaStep) -> Derivatives:
    replica: Any = step.replica  # a `TorchReplica`
    found: Derivatives = replica.derivatives
    return found


def _remembered(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step = _looking()
        if step is None:
            return original(outputs, inputs, *args, **kwargs)
        sources = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
        leaves = {id(leaf) for leaf in _leaves(step)}
        are_leaves = [id(source) in leaves for source in sources]
        if step.is_rehearsal and any(are_leaves):
            step.differentiated(outputs)
            return tuple(map(torch.zeros_like, sources))
        result = original(outputs, inputs, *args, **kwargs)
        _derivatives_of(step).add(
            gradient
            for gradient, is_leaf in zip(result, are_leaves, strict=True)
            if is_leaf
        )
        return result

    return grad


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        step = _looking()
        if step is None:
            original(tensors, *args, **kwargs)
            return
        if step.is_rehearsal:
            step.differentiated(tensors)
            for leaf in _leaves(step):
                leaf.grad = torch.zeros_like(leaf)
            return
        derivatives = _derivatives_of(step)
        derivatives.check(leaf.grad for leaf in _leaves(step))
        original(tensors, *args, **kwargs)
        derivatives.add(leaf.grad for leaf in _leaves(step))

    return backward


def _leaves(step: ReplicaStep) -> list[torch.Tensor]:
    return [
        value
        for value in list(step.scope.state_mapping.values())
        if isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.is_leaf
    ]


def _is_dense(gradient: Any) -> bool:
    return (
        isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided
    )


def _size(gradient: torch.Tensor) -> float:
    """Returns the sum of absolute values, with 0 for NaN and 1 for infinity."""
    with torch.no_grad():
        return float(gradient.detach().abs().nan_to_num(0.0, 1.0).sum())
