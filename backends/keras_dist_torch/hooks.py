"""The table of what is replaced in PyTorch, and in Keras for it, and why.

It is in place as long as that of the front end, `keras_dist/fit/hooks.py`.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import torch

from keras_dist.plugins import Hook
from keras_dist.plugins import Trainer
from keras_dist.plugins import as_hook
from keras_dist.plugins import bound
from keras_dist.plugins import current_step
from keras_dist.plugins import current_strategy
from keras_dist.plugins import in_cross_replica_context
from keras_dist.plugins import is_alone_on_purpose
from keras_dist_torch import chunks
from keras_dist_torch import gradients
from keras_dist_torch import prefetch
from keras_dist_torch.compiled_replica import refuse
from keras_dist_torch.keras_internals import CustomGradient
from keras_dist_torch.keras_internals import EpochIterator
from keras_dist_torch.keras_internals import ParallelOptimizer
from keras_dist_torch.keras_internals import device_scope
from keras_dist_torch.replicas import TorchCentralExecutor
from keras_dist_torch.torch_internals import CLIPS


def table() -> Iterator[Hook]:
    """Returns the rows, by what they are for."""
    why = "initial values of central storage are those of a replica's device"
    name = "_initialize_with_initializer"
    yield Hook(keras.Variable, name, _hook_initialization, why)
    why = "batches are sent to a GPU while it computes"
    yield Hook(EpochIterator, "_get_iterator", prefetch.hook_batches, why)
    why = "`zero_grad` clears the gradients of its replica"
    yield Hook(keras.Layer, "zero_grad", gradients.hook_zero_grad, why)
    why = "what would see, or change, one replica's gradient is refused"
    refusing, clipping = gradients.hook_clipping, torch.nn.utils.clip_grad
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        yield Hook(torch.nn.utils, name, refusing, why)
        yield Hook(clipping, name, refusing, why)
    # `clip_grad_norm_` calls it, however a program has imported that.
    if hasattr(clipping, CLIPS):
        yield Hook(clipping, CLIPS, refusing, why)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield Hook(torch.Tensor, name, gradients.hook_registering, why)
    step = gradients.GlobalStepHook()
    refuse = gradients.refuse_step
    yield Hook(step, "before_step", lambda _: refuse, why)
    why = "variables in parts get weighed gradients"
    yield Hook(torch.autograd, "grad", gradients.hook_grad, why)
    yield Hook(torch.autograd, "backward", gradients.hook_backward, why)
    why = "a gradient that a user defines sees that of one device"
    custom = gradients.hook_custom_gradient
    yield Hook(CustomGradient, "forward", custom, why)
    why = "activations are computed again with the same random numbers"
    checkpoint = torch.utils.checkpoint
    yield Hook(checkpoint, "checkpoint", _hook_checkpoint, why)
    why = "an update needs little memory"
    name = "_backend_update_step"
    yield Hook(ParallelOptimizer, name, chunks.hook_update, why)
    # From Keras 3.16, it begins wherever a program has a default process
    # group: Keras puts models into DistributedDataParallel, and sums metrics
    # once more.
    if "_initialize_ddp" in vars(Trainer):
        why = "Keras' own distribution leaves models of strategies alone"
        parent: Any = Trainer.__mro__[1]
        for name, instead in (
            ("_initialize_ddp", lambda model: None),
            ("get_metrics_result", parent.get_metrics_result),
        ):
            make = as_hook(functools.partial(_hook_distribution, instead))
            yield Hook(Trainer, name, make, why)


@as_hook
def _hook_checkpoint(
    original: Callable[..., Any],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    step = current_step()
    if step is not None and step.is_compiled:
        # A part of a graph would be left to Python, with other masks.
        refuse("a checkpoint of activations")
    if step is not None:
        if step.replica.look is not None:
            step.replica.look.note("it computes activations again")
        function = step.replica.draws.repeatable(function)
    return original(function, *args, **kwargs)


@as_hook
def _hook_initialization(original: Any, self: Any, initializer: Any) -> None:
    device = _initial_values_device(self)

    def on_device(*args: Any, **kwargs: Any) -> Any:
        with keras.device(device):
            return initializer(*args, **kwargs)

    original(self, initializer if device is None else on_device)


def _initial_values_device(variable: keras.Variable) -> str | None:
    """Returns where to compute a value that rests on another device."""
    owner = vars(variable).get("distribute_strategy")
    if owner is None and in_cross_replica_context():
        owner = current_strategy()
    executor = getattr(owner, "executor", None)
    # A symbolic call has no values.
    if (
        not isinstance(executor, TorchCentralExecutor)
        or device_scope() == "meta"
    ):
        return None
    return str(executor.initial_values_device())


def _hook_distribution(
    instead: Callable[[Any], Any], original: Callable[..., Any], self: Any, /
) -> Any:
    """Does something else for models that are kept out of it.

    Those that each worker trains alone on purpose are, too.
    """
    is_kept_out = bound(self) is not None or is_alone_on_purpose()
    return (instead if is_kept_out else original)(self)
