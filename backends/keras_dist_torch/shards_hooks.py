"""The tables of what is replaced for sharded variables, and why.

They are in place as long as that of the front end, whose rows they begin with.
"""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import HOOKS as ALL_HOOKS
from keras_dist.plugins import WITH_APPLY
from keras_dist.plugins import Hook
from keras_dist.plugins import Hooks
from keras_dist.plugins import as_hook
from keras_dist.plugins import current_replica
from keras_dist.plugins import innermost_layer
from keras_dist.plugins import replaced
from keras_dist.plugins import seen_warnings
from keras_dist_torch.chunks import is_elementwise
from keras_dist_torch.dtensor_internals import dispatch
from keras_dist_torch.keras_internals import ParallelOptimizer
from keras_dist_torch.shards import ShardsScope
from keras_dist_torch.shards import is_sharded
from keras_dist_torch.shards import local_shard
from keras_dist_torch.shards import shards_scope
from keras_dist_torch.units import is_live


@as_hook
def _hook_tracking(
    original: Callable[..., Any], self: Any, /, *args: Any
) -> None:
    """Keeps Keras from gathering variables to register them with PyTorch."""
    if not is_live(self):
        with ShardsScope():
            original(self, *args)


@as_hook
def _hook_update(
    original: Callable[..., Any],
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable],
    learning_rate: object,
) -> None:
    """Has an optimizer compute with this worker's parts themselves, without
    what `DTensor` does for each operation."""
    scope = shards_scope()
    if (
        scope is None
        or not is_elementwise(self)
        or not _are_alike(scope, grads, trainable_variables)
    ):
        original(self, grads, trainable_variables, learning_rate)
        return
    local_grads = [*map(local_shard, grads)]
    with replaced(scope, is_local=True):
        original(self, local_grads, trainable_variables, learning_rate)


def _are_alike(
    scope: ShardsScope,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> bool:
    """Returns whether each gradient is in parts as its variable is, if so."""
    placements = [
        [getattr(tensor, "placements", None) for tensor in side]
        for side in (grads, map(scope.tensor, variables))
    ]
    return bool(placements[0] == placements[1])


@as_hook
def _hook_clip(
    original: Callable[..., Any], self: Any, grads: Sequence[Any]
) -> Any:
    """Clips by norms with one sum over workers for all of them."""
    scope = shards_scope()
    limit = self.clipnorm or self.global_clipnorm
    if scope is None or not (limit and limit > 0):
        return original(self, grads)
    local_squares = [
        _widened(local_shard(gradient)).square().sum() for gradient in grads
    ]
    squares = _totals(scope, grads, local_squares)
    if self.clipnorm:
        norms = squares.sqrt().clamp(min=limit)
        scales: Any = (limit / norms).unbind()
    else:
        norm = squares.sum().sqrt()
        # NaN for a norm that is not finite, as in Keras.
        scale = limit / norm.clamp(min=limit) + (norm - norm)
        scales = [scale] * len(grads)
    return [
        gradient * scale.to(gradient.dtype)
        for gradient, scale in zip(grads, scales, strict=True)
    ]


@as_hook
def _hook_finite(
    original: Callable[..., Any], self: Any, grads: Sequence[Any]
) -> Any:
    """Looks for infinity and NaN with one sum over workers."""
    scope = shards_scope()
    given = [gradient for gradient in grads if gradient is not None]
    if scope is None or not given:
        return original(self, grads)
    wrong = [
        (~local_shard(gradient).isfinite()).sum().float() for gradient in given
    ]
    return _totals(scope, given, wrong).sum() == 0


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _totals(
    scope: ShardsScope,
    tensors: Sequence[Any],
    local_numbers: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Sums a number of each tensor over workers, of those that are in parts."""
    numbers = torch.stack([*local_numbers])
    are_parts = [isinstance(tensor, DTensor) for tensor in tensors]
    assert scope.workers is not None
    (total,) = scope.workers.sum([numbers], what="norms of gradients")
    return torch.where(
        torch.tensor(are_parts, device=numbers.device), total, numbers
    )


@as_hook
def _hook_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Refuses updates outside of steps, which would change copies only."""
    trained = list(trainable_variables or ())
    is_outside = current_replica() is None and shards_scope() is None
    if is_outside and any(map(is_sharded, [*self.variables, *trained])):
        raise UnsupportedModelError(
            f"Optimizer '{self.name}' was called outside of `fit`, "
            "`train_on_batch`, a `train_step` and `strategy.run`, for "
            "variables in parts. Expected: an update in a model's "
            "`train_step` or in a replica function, or variables='mirrored'."
        )
    original(self, grads, trainable_variables and trained)


class _Called(threading.local):
    def __init__(self) -> None:
        # Takes the models that a replica function calls.
        self.prepare: Callable[[keras.Model], None] | None = None


_called = _Called()


@as_hook
def _hook_call(
    original: Callable[..., Any], layer: object, /, *args: Any, **kw: Any
) -> Any:
    """Prepares a model that a replica function calls itself."""
    prepare = _called.prepare if isinstance(layer, keras.Model) else None
    if prepare is not None and innermost_layer() is None:
        prepare(layer)
    return original(layer, *args, **kw)


def preparing(
    prepare: Callable[[keras.Model], None],
) -> contextlib.AbstractContextManager[None]:
    """Inside, models that are called are given to a function before."""
    return replaced(_called, prepare=prepare)


def _see(text: str) -> bool:
    # It is right: such a variable is the same on all workers.
    is_ours = shards_scope() is not None
    return is_ours and "non-scalar tensor with numel=1" in text


def table_of_updates() -> Iterator[Hook]:
    """Returns the rows for updates of parts by optimizers."""
    yield from ALL_HOOKS.rows()
    why = "an optimizer computes with a worker's parts themselves"
    name = "_backend_update_step"
    yield Hook(ParallelOptimizer, name, _hook_update, why)
    why = "norms and checks of all parts take one sum over workers"
    yield Hook(keras.optimizers.Optimizer, "_clip_gradients", _hook_clip, why)
    scaling = keras.optimizers.LossScaleOptimizer
    yield Hook(scaling, "check_finite", _hook_finite, why)
    why = "a worker's copy of a number among parts is not warned of"
    yield Hook(dispatch, "warnings", seen_warnings(_see), why)


def _table() -> Iterator[Hook]:
    yield from table_of_updates()
    why = "nothing is gathered to register it with PyTorch"
    for name in ("_track_variables", "_post_track_variable"):
        yield Hook(keras.Layer, name, _hook_tracking, why)
    why = "updates outside of steps, which would change copies, are refused"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", _hook_apply, why)
    why = "a model's layers are in parts before a replica calls it"
    yield Hook(keras.Layer, "__call__", _hook_call, why)


# Of executors of sharded variables.
HOOKS = Hooks(_table)
