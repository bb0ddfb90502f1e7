"""Sums of gradients over replicas, and patches of torch and Keras for them.

In a step, hooks on results of layers see gradients as large as on one device.
Hooks on variables, which would see one replica's gradient, are refused.
"""

import functools
import inspect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import keras
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import WHOLE
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaStep
from keras_dist.plugins import RowShard
from keras_dist.plugins import all_variables
from keras_dist.plugins import as_hook
from keras_dist.plugins import current_replica
from keras_dist.plugins import current_step
from keras_dist.plugins import with_weighed_gradient
from keras_dist_torch.loss_weighting import WeighsLosses
from keras_dist_torch.loss_weighting import check_not_in_function
from keras_dist_torch.loss_weighting import refuse_derivatives
from keras_dist_torch.loss_weighting import weighing_replica
from keras_dist_torch.torch_internals import CLIPS


def detached(leaf: object) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


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
        # Its own, which the caller may change in place.
        return replica.all_reduce(what, value).clone()

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[Any, None, None, None]:
        # Losses of a replica that weighs them have its weight already.
        has_weight = isinstance(ctx.replica, WeighsLosses)
        share = WHOLE if has_weight else ctx.replica.share
        weighted = gradient * share.weight
        what = f"the gradient of {ctx.what}"
        # Not `all_reduce`: second derivatives pass here too.
        total = AllSum.apply(weighted, ctx.replica, what, None)
        return total * share.inverse, None, None, None


def weighted_sum(
    gradients: Sequence[Sequence[Any]],
    weights: Sequence[float],
    device: torch.device,
) -> list[Any]:
    """Sums replicas' lists of gradients, weighted; some may be `None`."""
    total: list[Any] = [None] * len(gradients[0])
    for replica_gradients, weight in zip(gradients, weights, strict=True):
        present = [i for i, g in enumerate(replica_gradients) if g is not None]
        if not present:
            continue
        here = [replica_gradients[i].to(device) for i in present]
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


class GlobalStepHook:
    """An attribute that torch calls before each step of its optimizers."""

    before_step: Any = None

    def __setattr__(self, name: str, value: object) -> None:
        handle = register_optimizer_step_pre_hook(value)
        vars(self).update({name: value, "handle": handle})

    def __delattr__(self, name: str) -> None:
        vars(self).pop("handle").remove()
        del vars(self)[name]


def hook_custom_gradient(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def forward(ctx: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return original(ctx, with_weighed_gradient(fn), *args, **kwargs)

    return staticmethod(forward)


def hook_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    """Makes `zero_grad` of a layer clear the current replica's gradients."""

    @functools.wraps(original)
    def zero_grad(self: keras.Layer, set_to_none: bool = True) -> None:
        step = current_replica()
        if step is None:
            original(self, set_to_none)
            return
        loss_weighting = weighing_replica()
        if loss_weighting is not None:
            loss_weighting.zero_grad(self.trainable_variables)
        leaves = step.scope.state_mapping
        for variable in self.trainable_variables:
            leaf = leaves.get(id(variable))
            if leaf is not None:
                leaf.grad = None

    return zero_grad


@as_hook
def hook_clipping(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Makes a function of torch that clips gradients raise in a step."""
    if current_step() is not None:
        name = original.__name__
        called = "clip_grad_norm_" if name == CLIPS else name
        raise UnsupportedModelError(
            f"`torch.nn.utils.{called}` was called in a `train_step` that runs "
            "on several replicas.\nEach replica has gradients of its own rows "
            "only, on its own tensors, which `model.parameters()` does not "
            "return. Expected: gradients that stay as they were computed. Use "
            "`clipnorm`, `global_clipnorm` or `clipvalue` of the optimizer, "
            "which clip the sum of all replicas' gradients."
        )
    return original(*args, **kwargs)


# The original functions, for this package.
after_accumulation = torch.Tensor.register_post_accumulate_grad_hook
plain_backward = torch.autograd.backward
plain_grad = torch.autograd.grad


def refuse_hooks(variable: keras.Variable, parameter: torch.Tensor) -> NoReturn:
    """Refuses hooks that a user has put on the tensor of a variable."""
    is_early = bool(parameter._backward_hooks)
    name = "register_hook" if is_early else "register_post_accumulate_grad_hook"
    _refuse(name, variable.path)


@as_hook
def hook_registering(original: Any, self: torch.Tensor, hook: Any) -> Any:
    """Scales gradients for hooks of a step, and refuses those on variables."""
    step, name = current_step(), original.__name__
    if step is not None and not step.is_compiled:
        if step.replica.look is not None:
            step.replica.look.note(f"it calls `torch.Tensor.{name}`")
        if _is_variable(self, step):
            _refuse(name, "a variable")
        if name == "register_hook" and weighing_replica() is None:
            hook = _of_one_device(hook, step.share)
    return original(self, hook)


def _is_variable(tensor: torch.Tensor, step: ReplicaStep) -> bool:
    return tensor.is_leaf and any(
        value is tensor for value in step.scope.state_mapping.values()
    )


def _of_one_device(hook: Callable[..., Any], share: RowShard) -> Any:
    if share.weight == 1.0:
        return hook

    @functools.wraps(hook)
    def weighed(gradient: torch.Tensor) -> torch.Tensor | None:
        result = hook(gradient * share.weight)
        return None if result is None else result * share.inverse

    return weighed


def _refuse(method: str, name: str) -> NoReturn:
    raise UnsupportedModelError(
        f"`torch.Tensor.{method}` was called on the tensor of {name}, in a "
        "model that runs on several replicas.\nEach replica would call the "
        "hook with the gradient of its own rows. Expected: variables without "
        "hooks. To clip gradients use `clipnorm`, `global_clipnorm` or "
        "`clipvalue` of the optimizer; to change them in another way "
        "override the optimizer's `apply`, which gets the sum of all "
        "replicas' gradients."
    )


def refuse_in_place(model: keras.Model, key: int) -> NoReturn:
    """Refuses a change of the tensor of a variable, which has an id."""
    paths = [v.path for v in all_variables(model) if id(v) == key]
    raise UnsupportedModelError(
        f"The tensor of variable '{(paths or ['?'])[0]}' was changed in place "
        "in a step that runs on several replicas of one process: each would "
        "change it once more, or a copy of it. Expected: `variable.assign`, "
        "`assign_add` or `assign_sub`, as in `t.assign(0.9 * t + 0.1 * s)`. "
        "With a process for each device (`keras_dist.launch`), a change that "
        "is the same on each works."
    )


def refuse_step(
    optimizer: keras.Optimizer, args: object, kwargs: object
) -> None:
    """Refuses an optimizer of PyTorch's own that takes a step."""
    state = current_replica()
    if state is None or state.strategy.plan.num_replicas == 1:
        return
    raise UnsupportedModelError(
        f"`torch.optim.{type(optimizer).__name__}` was used in a step that "
        "runs on several replicas.\nTheir gradients are on tensors of their "
        "own, and are summed in the `apply` of a Keras optimizer only. "
        "Expected: a `keras.optimizers.Optimizer`, as in "
        "`self.optimizer.apply(gradients, variables)`. An optimizer of "
        "PyTorch's works on one device, not with a process for each device "
        "either."
    )


def hook_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: object, inputs: object, *args: Any, **kwargs: Any) -> Any:
        check_not_in_function("torch.autograd.grad")
        if weighing_replica() is not None:
            refuse_derivatives("torch.autograd.grad")
        return original(outputs, inputs, *args, **kwargs)

    return grad


def hook_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def backward(tensors: object, *args: Any, **kwargs: Any) -> None:
        check_not_in_function("backward")
        loss_weighting = weighing_replica()
        if loss_weighting is not None:
            given = signature.bind(tensors, *args, **kwargs).arguments
            if given.get("create_graph") or given.get("inputs"):
                refuse_derivatives("`backward` with `create_graph` or `inputs`")
            loss_weighting.backward(
                lambda weighed: original(weighed, *args, **kwargs), tensors
            )
            return
        original(tensors, *args, **kwargs)

    return backward
