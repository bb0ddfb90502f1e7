"""The table of what is replaced for variables in parts, and why.

It is in place as long as that of the front end, whose rows it begins with.
"""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
from torch.distributed.tensor import DTensor

from keras_dist.core.context import replaced
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.hooks import seen_warnings
from keras_dist.internals.keras_optimizers import WITH_APPLY
from keras_dist.internals.private_names import private
from keras_dist.plugin import front_end
from keras_dist.replica.state import current_replica
from keras_dist_torch.chunks import may_cut
from keras_dist_torch.keras_internals import ParallelOptimizer
from keras_dist_torch.parts import are_in_parts
from keras_dist_torch.parts import as_local_parts
from keras_dist_torch.parts import as_parts
from keras_dist_torch.parts import reads_parts
from keras_dist_torch.parts import stored
from keras_dist_torch.units import is_live

dispatch = private("torch.distributed.tensor._dispatch")


@as_hook
def _hook_tracking(original: Any, self: Any, /, *args: Any) -> None:
    """Keeps Keras from gathering variables to register them with PyTorch."""
    if not is_live(self):
        with as_parts():
            original(self, *args)


@as_hook
def _hook_assignment(original: Any, self: Any, value: Any) -> None:
    """Gathers what an optimizer assigns to a variable that is not in parts."""
    is_ours = "distribute_strategy" in vars(self)
    if is_ours and isinstance(value, DTensor):
        value = value.full_tensor()
    original(self, value)


@as_hook
def _hook_update(
    original: Any,
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable],
    learning_rate: Any,
) -> None:
    """Has an optimizer compute with this worker's parts themselves, without
    what `DTensor` does for each operation."""
    if not (
        reads_parts()
        and may_cut(self)
        and all(map(_is_alike, grads, trainable_variables))
        and _has_slots_in_parts(self, trainable_variables)
    ):
        original(self, grads, trainable_variables, learning_rate)
        return
    own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    with as_local_parts():
        original(self, own, trainable_variables, learning_rate)


def _is_alike(gradient: Any, variable: keras.Variable) -> bool:
    """Returns whether a gradient is in parts as its variable is, or neither."""
    kept = stored(variable)
    if isinstance(kept, DTensor) and isinstance(gradient, DTensor):
        return bool(kept.placements == gradient.placements)
    return kept is None and not isinstance(gradient, DTensor)


def _has_slots_in_parts(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> bool:
    """Returns whether no slot is whole whose variable may be in parts."""
    shapes = {each.shape for each in variables if stored(each) is not None}
    return not any(
        each.shape in shapes and stored(each) is None
        for each in optimizer.variables
    )


@as_hook
def _hook_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Refuses updates outside of steps, which would change copies only."""
    trained = list(trainable_variables or ())
    is_outside = current_replica() is None and not reads_parts()
    if is_outside and are_in_parts([*self.variables, *trained]):
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
def _hook_call(original: Any, layer: Any, /, *args: Any, **kw: Any) -> Any:
    """Prepares a model that a replica function calls itself."""
    prepare = _called.prepare if isinstance(layer, keras.Model) else None
    if prepare is not None and keras_internals.innermost_layer() is None:
        prepare(layer)
    return original(layer, *args, **kw)


def preparing(
    prepare: Callable[[keras.Model], None],
) -> contextlib.AbstractContextManager[None]:
    """Inside, models that are called are given to a function before."""
    return replaced(_called, prepare=prepare)


def _see(text: str) -> bool:
    # It is right: such a variable is the same on all workers.
    return reads_parts() and "non-scalar tensor with numel=1" in text


def _table() -> Iterator[Hook]:
    yield from front_end.HOOKS.rows()
    why = "nothing is gathered to register it with PyTorch"
    for name in ("_track_variables", "_post_track_variable"):
        yield Hook(keras.Layer, name, _hook_tracking, why)
    why = "what is assigned to a variable that is whole is gathered"
    yield Hook(keras.Variable, "_direct_assign", _hook_assignment, why)
    why = "updates outside of steps, which would change copies, are refused"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", _hook_apply, why)
    why = "an optimizer computes with a worker's parts themselves"
    name = "_backend_update_step"
    yield Hook(ParallelOptimizer, name, _hook_update, why)
    why = "a worker's copy of a number among parts is not warned of"
    yield Hook(dispatch, "warnings", seen_warnings(_see), why)
    why = "a model's layers are in parts before a replica calls it"
    yield Hook(keras.Layer, "__call__", _hook_call, why)


HOOKS = Hooks(_table)
