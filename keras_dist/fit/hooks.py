"""Hooks on methods of Keras for replicas, and their installation."""

import contextlib
import functools
import inspect
import operator
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from keras import tree

from keras_dist.core import context
from keras_dist.core.rows import scaled
from keras_dist.fit import losses
from keras_dist.fit import own_code
from keras_dist.fit import updates
from keras_dist.internals import keras_internals
from keras_dist.internals.overrides import as_hook
from keras_dist.internals.overrides import hook_overrides
from keras_dist.plugin.draws import has_common_seeds
from keras_dist.replica import state
from keras_dist.replica.exchange import is_float
from keras_dist.replica.exchange import is_row_shaped
from keras_dist.replica.scopes import Overlay
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.scopes import suspended

# Marks layers that were made with `synchronized` under a strategy.
_MADE_HERE = "_keras_dist_synchronizes"


@as_hook
def hook_warn(
    original: Any,
    message: Any,
    category: Any = None,
    stacklevel: int = 1,
    source: Any = None,
    **options: Any,
) -> None:
    """Stands for `warnings.warn`; replicas that warn alike show it once."""
    step = state.current_replica()
    if step is not None:
        frame = sys._getframe(2)
        place = frame.f_code.co_filename, frame.f_lineno, str(message)
        if step.replica.repeats(place):
            return
    # This function and its wrapper add a frame each.
    original(message, category, stacklevel + 2, source, **options)


@as_hook
def _hook_moments(
    original: Any, self: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Stands for `BatchNormalization._moments`, with all replicas' rows."""
    step: state.ReplicaState | None = state.current_step()
    call = state.current_call()
    if call is not None and self.synchronized:
        step = call
    moving = [self.moving_mean, self.moving_variance]
    if step is not None:
        step.same_on_all(moving)
        return _global_moments(step, self, inputs, mask)
    if not self.synchronized or _MADE_HERE not in vars(self):
        mean, variance = original(self, inputs, mask)
        return mean, variance
    # This thread has all rows. Keras synchronizes on TensorFlow only.
    self.synchronized = False
    try:
        mean, variance = original(self, inputs, mask)
    finally:
        self.synchronized = True
    return mean, variance


# Cached, because it is slow and scopes are entered often.
_signature_of = functools.cache(inspect.signature)


def hook_constructor(original: Callable[..., None]) -> Callable[..., None]:
    """Allows `synchronized=True`, which Keras does on TensorFlow only."""

    @functools.wraps(original)
    def __init__(
        self: Any, *args: Any, synchronized: bool = False, **kwargs: Any
    ) -> None:
        if not context.has_strategy():
            original(self, *args, synchronized=synchronized, **kwargs)
            return
        original(self, *args, **kwargs)
        self.synchronized = synchronized
        object.__setattr__(self, _MADE_HERE, True)

    # Keras reads the signature to find a layer's configuration.
    __init__.__signature__ = _signature_of(original)  # type: ignore[attr-defined]
    return __init__


def _global_moments(
    step: state.ReplicaState, layer: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Returns the mean and variance over the rows of all replicas.

    Two sums, one after the other: a difference of large sums loses precision.
    """
    what = f"the batch statistics of layer '{layer.name}'"
    axes = layer._reduction_axes
    if mask is not None:
        mask = ops.cast(ops.expand_dims(mask, axis=-1), "bool")
        mask = ops.broadcast_to(mask, ops.shape(inputs))
    counted = (
        ops.ones_like(inputs) if mask is None else ops.cast(mask, inputs.dtype)
    )
    keep = step.share.keep

    def total(values: Any) -> Any:
        if mask is not None:
            values = ops.where(mask, values, 0)
        return keep(ops.sum(values, axes))

    count = keep(ops.sum(counted, axes))
    both = step.replica.all_sum(what, ops.stack([total(inputs), count]))
    # Keras adds epsilon only with a mask, and the numbers have to agree.
    count = both[1] + (0.0 if mask is None else keras.config.epsilon())
    mean = both[0] / count
    shape = [1] * len(inputs.shape)
    shape[layer.axis] = -1
    distance = ops.square(inputs - ops.reshape(mean, shape))
    variance = step.replica.all_sum(what, total(distance)) / count
    return mean, variance


@as_hook
def _hook_seed(original: Any, self: Any, ordered: bool = True) -> Any:
    seed = original(self, ordered)
    step = None if has_common_seeds() else state.current_replica()
    offset = 0 if step is None else step.replica.seed_offset
    if isinstance(offset, int) and not offset:
        return seed
    # Added to the drawn seed and not to the stored state, which stays the same
    # on each replica and equals that of one device.
    return seed + ops.convert_to_tensor([offset, 0], dtype=seed.dtype)


@as_hook
def _hook_clear_losses(original: Any, self: Any) -> None:
    step = state.of_thread.step or state.of_thread.call
    scope = keras_internals.stateless_scope()
    if isinstance(scope, Overlay):
        scope.clear_losses(self)
    elif step is None:
        original(self)
    else:
        # Replicas share layers: clear this replica's losses only.
        step.scope.clear_losses(self)


@as_hook
def _hook_add_loss(original: Any, self: Any, loss: Any) -> None:
    step = state.current_step()
    if step is not None and step.counts_losses and base_scope() is step.scope:
        # The caller of `add_loss`, which `as_hook` wraps.
        by = sys._getframe(2).f_globals.get("__name__", "")
        term = functools.partial(_term, step, self, by)
        loss = tree.map_structure(term, loss)
    original(self, loss)


def _term(
    step: state.ReplicaStep, layer: keras.Layer, by: str, loss: Any
) -> Any:
    """Scales what a layer adds; its mean over rows is then the global loss.

    Keras sums the values of a tensor. A number counts as a mean over rows.
    """
    if is_row_shaped(loss) and _has_a_value_a_row(loss, step.share.rows):
        if not is_float(loss):
            loss = ops.cast(loss, keras.config.floatx())
        return scaled(loss, step.share.inverse)
    own_code.tell_of_number(step.strategy, step.model, layer, by)
    return loss


def _has_a_value_a_row(loss: Any, rows: Any) -> bool:
    size = loss.shape[0]
    if size is None or not isinstance(rows, int):
        return size is None
    return bool(size == max(rows, 1))


@as_hook
def _hook_build(original: Any, self: Any, call_spec: Any) -> None:
    call = state.current_call()
    if self.built:
        original(self, call_spec)
        return
    if call is None:
        with suspended():
            original(self, call_spec)
        return

    def build_once(specs: list[Any]) -> None:
        with call.runner.building():
            original(self, specs[0])

    what = f"the build of layer '{self.name}'"
    call.replica.meet(what, build_once, call_spec)


@functools.cache
def install() -> None:
    """Installs all hooks; further calls do nothing."""
    for cls in keras_internals.losses_with_own_call():
        _wrap(cls, "__call__", losses.hook_call)
    hook_overrides(keras.losses.Loss, "__call__", losses.hook_own_call)
    for module in keras_internals.modules_that_reduce_losses():
        _wrap(module, "reduce_weighted_values", losses.hook_reduction)
    module = keras_internals.losses
    for name, by in (("scale", operator.truediv), ("unscale", operator.mul)):
        hook = as_hook(functools.partial(losses.scale, by))
        _wrap(module, f"{name}_loss_for_distribution", hook)
    install_normalization()
    _wrap(keras.random.SeedGenerator, "next", _hook_seed)
    _wrap(warnings, "warn", hook_warn)
    _wrap(keras.Layer, "_clear_losses", _hook_clear_losses)
    _wrap(keras.Layer, "add_loss", _hook_add_loss)
    updates.install()


def install_normalization() -> None:
    """Installs the hook on batch normalization, needed in a scope too."""
    _wrap(keras.layers.BatchNormalization, "_moments", _hook_moments)


def install_for_functions() -> None:
    """Installs the hooks on layers that functions of the user need."""
    _wrap(keras.Layer, "_clear_losses", _hook_clear_losses)
    _wrap(keras.Layer, "_maybe_build", _hook_build)


@functools.cache
def _wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Wraps a method or function for good, once for each hook."""
    setattr(owner, name, hook(getattr(owner, name)))


class SharedHooks(contextlib.AbstractContextManager[None]):
    """Wraps methods of Keras while at least one thread is in this context.

    A class, and hooks are made once, because each step enters it often.
    """

    def __init__(self, *table: tuple[Any, str, Callable[..., Any]]) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._count = 0
        # By owner and name: the method that was wrapped, and the wrapper.
        self._made: dict[tuple[Any, str], tuple[Any, Any]] = {}
        self._inherited: set[tuple[Any, str]] = set()

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._install()
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._remove()

    def _install(self) -> None:
        for owner, name, hook in self._table:
            place = owner, name
            if name not in vars(owner):
                self._inherited.add(place)
            original = getattr(owner, name)
            made = self._made.get(place)
            if made is None or made[0] is not original:
                made = self._made[place] = original, hook(original)
            setattr(owner, name, made[1])

    def _remove(self) -> None:
        for owner, name, _ in reversed(self._table):
            if (owner, name) in self._inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, self._made[owner, name][0])
        self._inherited.clear()
