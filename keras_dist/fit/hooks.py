"""Hooks on Keras' methods at which a step's replicas meet, installed once.

These are methods of classes rather than of instances, because a user's
`train_step` may use losses, optimizers, layers and seeds that no model knows.
One hook is on Python's `warnings.warn`, because users' code warns on each
replica. Each hook has an effect only in a thread that runs a replica.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from keras import tree

from keras_dist.fit import lone_updates
from keras_dist.fit import losses
from keras_dist.fit.normalization import hook_moments
from keras_dist.fit.repeated_warnings import hook_warn
from keras_dist.internals import keras_internals
from keras_dist.internals.overrides import hook_overrides
from keras_dist.replica.probe import ProbeScope
from keras_dist.replica.scopes import Overlay
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.scopes import suspended
from keras_dist.replica.state import current_call
from keras_dist.replica.state import current_replica
from keras_dist.replica.state import current_step


@functools.cache
def install() -> None:
    """Installs all hooks; further calls do nothing."""
    _wrap(keras.losses.Loss, "__call__", losses.hook_call)
    hook_overrides(keras.losses.Loss, "__call__", losses.hook_own_call)
    module = keras_internals.losses
    _wrap(module, "reduce_weighted_values", losses.hook_reduction)
    _wrap(module, "scale_loss_for_distribution", losses.hook_scaling)
    _wrap(module, "unscale_loss_for_distribution", losses.hook_unscaling)
    install_normalization()
    _wrap(keras.random.SeedGenerator, "next", _hook_seed)
    _wrap(warnings, "warn", hook_warn)
    install_losses_of_layers()
    _wrap(keras.Layer, "add_loss", _hook_add_loss)
    lone_updates.install()


@functools.cache
def install_normalization() -> None:
    """Installs the hook on batch normalization, needed in a scope too."""
    _wrap(keras.layers.BatchNormalization, "_moments", hook_moments)


@functools.cache
def install_losses_of_layers() -> None:
    """Installs the hook on layers that clear the losses of their last call."""
    _wrap(keras.Layer, "_clear_losses", _hook_clear_losses)


@functools.cache
def install_building() -> None:
    """Installs the hook on layers that are built by their first call."""
    _wrap(keras.Layer, "_maybe_build", _hook_build)


def _wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    setattr(owner, name, hook(getattr(owner, name)))


def _hook_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def next(self: Any, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        step = current_replica()
        offset = 0 if step is None else step.replica.seed_offset
        if isinstance(offset, int) and not offset:
            return seed
        # Added to the drawn seed and not to the stored state, which stays the
        # same on each replica and equals that of one device.
        return seed + ops.convert_to_tensor([offset, 0], dtype=seed.dtype)

    return next


def _hook_clear_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _clear_losses(self: Any) -> None:
        step, scope = current_replica(), keras_internals.stateless_scope()
        if isinstance(scope, Overlay):
            scope.clear_losses(self)
            return
        if step is None:
            original(self)
            return
        # Replicas share layers: clear this replica's losses only.
        scope = step.scope
        if scope.losses:
            layers = self._flatten_layers()
            ids = {i for layer in layers for i in layer._loss_ids}
            scope.cleared_losses += [x for x in scope.losses if id(x) in ids]
            scope.losses[:] = [x for x in scope.losses if id(x) not in ids]

    return _clear_losses


def _hook_add_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_loss(self: Any, loss: Any) -> None:
        scope, step = keras_internals.stateless_scope(), current_step()
        if isinstance(scope, ProbeScope):
            scope.note(loss)
            return
        if (
            step is not None
            and step.counts_losses
            and base_scope() is step.scope
        ):
            term = functools.partial(step.kinds.term, step, self)
            loss = tree.map_structure(term, loss)
        original(self, loss)

    return add_loss


def _hook_build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _maybe_build(self: Any, call_spec: Any) -> None:
        call = current_call()
        if self.built:
            original(self, call_spec)
            return
        step = current_step()
        if step is not None and step.is_rehearsal:
            raise RuntimeError(f"Layer '{self.name}' is not built yet.")
        if call is None:
            with suspended():
                original(self, call_spec)
            return

        def build_once(specs: list[Any]) -> None:
            with call.runner.building():
                original(self, specs[0])

        what = f"the build of layer '{self.name}'"
        call.replica.meet(what, build_once, call_spec)

    return _maybe_build
