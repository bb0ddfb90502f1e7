"""Sums of gradients over replicas, and patches of torch and Keras for them.

In a step, hooks on results of layers see gradients as large as on one device.
Hooks on variables, which would see one replica's gradient, are refused.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import keras
import torch

from keras_dist.core.reduction import check_shapes
from keras_dist.core.rows import Share
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.replica import Replica
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import current_replica
from keras_dist.replica.state import current_step
from keras_dist_torch.derivatives import install_derivatives


class AllSum(torch.autograd.Function):
    """All-reduce of a tensor over replicas, in the backward pass as well."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        replica: Replica,
        what: str,
        total: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.replica = replica
        ctx.what = what
        if total is not None:
            return total.clone()
        return _sum(replica, what, value)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[Any, None, None, None]:
        share = ctx.replica.share
        weighted = gradient * share.weight
        what = f"the gradient of {ctx.what}"
        # Not `_sum`: second derivatives pass here too.
        total = AllSum.apply(weighted, ctx.replica, what, None)
        return total * share.inverse, None, None, None


def _sum(replica: Replica, what: str, value: torch.Tensor) -> torch.Tensor:
    def add(values: list[torch.Tensor]) -> torch.Tensor:
        check_shapes(values)
        total = values[0].clone()
        for other in values[1:]:
            total += other.to(total.device)
        workers = replica.group.workers
        return total if workers is None else workers.sum([total])[0]

    # A clone for each replica, which may change it in place.
    return replica.meet(what, add, value).clone()


def weighted_sum(
    gradients: Sequence[Sequence[Any]],
    weights: Sequence[float],
    device: torch.device,
) -> list[Any]:
    """Sums replicas' lists of gradients, weighted; some may be `None`."""
    total: list[Any] = [None] * len(gradients[0])
    for own, weight in zip(gradients, weights, strict=True):
        present = [i for i, g in enumerate(own) if g is not None]
        if not present:
            continue
        here = [own[i].to(device) for i in present]
        # A weight of zero drops a gradient even if it is NaN.
        terms = (
            torch._foreach_mul(here, weight)
            if weight
            else [torch.zeros_like(gradient) for gradient in here]
        )
        both = [
            (total[i], term)
            for i, term in zip(present, terms, strict=True)
            if total[i] is not None
        ]
        if both:
            torch._foreach_add_(
                *(list(side) for side in zip(*both, strict=True))
            )
        for i, term in zip(present, terms, strict=True):
            if total[i] is None:
                total[i] = term
    return total


@functools.cache
def install() -> None:
    """Patches torch and Keras for gradients of replicas, once."""
    _install_zero_grad()
    _install_clipping()
    install_derivatives()
    install_hooks()


def _install_zero_grad() -> None:
    """Makes `zero_grad` of a layer clear the current replica's gradients."""
    original = keras.Layer.zero_grad

    @functools.wraps(original)
    def zero_grad(self: keras.Layer, set_to_none: bool = True) -> None:
        step = current_replica()
        if step is None:
            original(self, set_to_none)
            return
        held = step.scope.state_mapping
        for variable in self.trainable_variables:
            leaf = held.get(id(variable))
            if leaf is not None:
                leaf.grad = None

    keras.Layer.zero_grad = zero_grad


def _install_clipping() -> None:
    """Makes torch's functions that clip gradients raise in a step."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(torch.nn.utils, name)
        refusing = _refusing(original)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(module, name, refusing)


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if current_step() is not None:
            name = original.__name__
            raise UnsupportedModelError(
                f"`torch.nn.utils.{name}` was called in a `train_step` that "
                "runs on several replicas. Each has gradients of its own rows "
                "only, at tensors of its own that `model.parameters()` does "
                "not give. Expected: gradients as they were computed. Use "
                "`clipnorm`, `global_clipnorm` or `clipvalue` of the "
                "optimizer, which clip their sum."
            )
        return original(*args, **kwargs)

    return clip


# The original method, for hooks of this package.
after_accumulation = torch.Tensor.register_post_accumulate_grad_hook


def check_hooks(variable: keras.Variable, parameter: torch.Tensor) -> None:
    """Refuses a variable whose tensor has hooks."""
    if parameter._backward_hooks:
        _refuse("register_hook", variable.path)
    if parameter._post_accumulate_grad_hooks:
        _refuse("register_post_accumulate_grad_hook", variable.path)


def install_hooks() -> None:
    """Scales gradients for hooks of a step, and refuses those on variables."""
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
