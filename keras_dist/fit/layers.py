"""Hooks on layers, which replicas share."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from keras import tree

from keras_dist.core.rows import scaled
from keras_dist.fit import own_code
from keras_dist.internals import keras_internals
from keras_dist.internals.hooks import as_hook
from keras_dist.replica import state
from keras_dist.replica.exchange import is_float
from keras_dist.replica.exchange import is_row_shaped
from keras_dist.replica.scopes import Overlay
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.scopes import suspended


# Hooks that each step calls often are no `as_hook`, which takes a call more.
def hook_clear_losses(original: Any) -> Any:
    """Has a replica clear its own losses only, as replicas share layers."""

    @functools.wraps(original)
    def _clear_losses(self: Any) -> None:
        step = state.of_thread.step or state.of_thread.call
        scope = keras_internals.stateless_scope()
        if isinstance(scope, Overlay):
            scope.clear_losses(self)
        elif step is None or step.is_compiled:
            original(self)
        else:
            step.scope.clear_losses(self)

    return _clear_losses


@as_hook
def hook_add_loss(original: Any, self: Any, loss: Any) -> None:
    step = state.current_step()
    if step is not None and step.is_compiled:
        loss = tree.map_structure(functools.partial(_term, step), loss)
    elif step is not None and step.counts_losses and base_scope() is step.scope:
        # The caller of `add_loss`, which `as_hook` wraps.
        by = sys._getframe(2).f_globals.get("__name__", "")
        told = step.strategy, step.model, self, by
        tell = functools.partial(own_code.tell_of_number, *told)
        term = functools.partial(_term, step, tell_of_number=tell)
        loss = tree.map_structure(term, loss)
    original(self, loss)


def _term(
    step: state.ReplicaStep | state.CompiledStep,
    loss: object,
    tell_of_number: Callable[[], None] = lambda: None,
) -> Any:
    """Scales what a layer adds; its mean over rows is then the global loss.

    Keras sums the values of a tensor. A number counts as a mean over rows.
    """
    if is_row_shaped(loss) and _has_a_value_a_row(loss, step.share.rows):
        if not is_float(loss):
            loss = ops.cast(loss, keras.config.floatx())
        return scaled(loss, step.share.inverse)
    tell_of_number()
    return loss


def _has_a_value_a_row(loss: Any, rows: Any) -> bool:
    size = loss.shape[0]
    if size is None or not isinstance(rows, int):
        return size is None
    return bool(size == max(rows, 1))


def hook_build(original: Any) -> Any:
    """Has replicas build a layer once, where they meet."""

    @functools.wraps(original)
    def _maybe_build(self: Any, call_spec: Any) -> None:
        if self.built:
            original(self, call_spec)
        elif state.of_thread.call is None:
            with suspended():
                original(self, call_spec)
        else:
            _build_together(state.of_thread.call, original, self, call_spec)

    return _maybe_build


def _build_together(
    call: state.ReplicaState, build: Any, layer: keras.Layer, call_spec: Any
) -> None:
    def build_once(specs: list[Any]) -> None:
        with call.runner.building():
            build(layer, specs[0])

    what = f"the build of layer '{layer.name}'"
    call.replica.rendezvous(what, build_once, call_spec)
