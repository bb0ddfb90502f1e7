"""The user's own hooks on gradients, in a step on several replicas.

Hooks on results of layers see gradients scaled to those of one device, as
functions of `keras.ops.custom_gradient` do. Hooks on variables are refused:
they would see the gradient of one replica's rows.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NoReturn

import keras
import torch

from keras_dist.core.rows import Share
from keras_dist.errors import UnsupportedModelError
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import current_step

# The original method, for hooks of this package.
after_accumulation = torch.Tensor.register_post_accumulate_grad_hook


def check_hooks(variable: keras.Variable, parameter: torch.Tensor) -> None:
    """Refuses a variable whose tensor has hooks.

    Raises:
        UnsupportedModelError: If the tensor has any.
    """
    if parameter._backward_hooks:
        _refuse("register_hook", variable.path)
    if parameter._post_accumulate_grad_hooks:
        _refuse("register_post_accumulate_grad_hook", variable.path)


def install_hooks() -> None:
    """Makes hooks that a step registers see gradients scaled to one device's.

    Hooks on variables are refused.
    """
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        original = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, _registering(original))


def _registering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        step = current_step()
        if step is not None:
            if _is_variable(self, step):
                _refuse(original.__name__, "a variable")
            if original.__name__ == "register_hook":
                hook = _of_one_device(hook, step.share)
        return original(self, hook)

    return register


def _is_variable(tensor: torch.Tensor, step: ReplicaStep) -> bool:
    return tensor.is_leaf and any(
        value is tensor for value in step.scope.state_mapping.values()
    )


def _of_one_device(hook: Callable[..., Any], share: Share) -> Any:
    if share.weight == 1.0:
        return hook

    @functools.wraps(hook)
    def weighed(gradient: torch.Tensor) -> torch.Tensor | None:
        found = hook(gradient * share.weight)
        return None if found is None else found * share.inverse

    return weighed


def _refuse(method: str, name: str) -> NoReturn:
    raise UnsupportedModelError(
        f"`torch.Tensor.{method}` was called on the tensor of {name}, in a "
        "model that runs on several replicas. Each replica would call the hook "
        "with the gradient of its own rows. Expected: variables without hooks. "
        "To clip gradients use `clipnorm`, `global_clipnorm` or `clipvalue` of "
        "the optimizer; to change them in another way override its `apply`, "
        "which gets their sum."
    )
