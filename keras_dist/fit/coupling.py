"""Warns of layers in which the rows of a batch depend on each other.

A replica has its own rows only. So in the first step, each layer with code of
the user is called again on a few rows and on both halves of them.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops
from keras import tree

from keras_dist.core.context import replaced
from keras_dist.fit.hooks import SharedHooks
from keras_dist.internals import keras_internals
from keras_dist.internals.keras_internals import LayerCall
from keras_dist.internals.keras_internals import opened
from keras_dist.internals.overrides import as_hook
from keras_dist.plugin.draws import drawn_by
from keras_dist.replica import probe
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import current_step

_HALF = probe.FEW_ROWS // 2
_PARTS = (slice(None), slice(None, _HALF), slice(_HALF, None))

# Classes of Keras that run code of the user.
_OF_USERS = (
    "FlaxLayer",
    "JaxLayer",
    "Lambda",
    "TFSMLayer",
    "TorchModuleWrapper",
)


@dataclass
class _Called:
    """A layer's inputs and outputs in one call, as NumPy arrays."""

    layer: keras.Layer
    inputs: list[Any]
    outputs: list[Any]


class _LayerCalls(threading.local):
    """The step, or the list, that this thread's layer calls are reported to."""

    def __init__(self) -> None:
        self.step: ReplicaStep | None = None
        self.calls: list[_Called] | None = None


_layer_calls = _LayerCalls()


@contextlib.contextmanager
def watched(step: ReplicaStep) -> Iterator[None]:
    """Checks the layers that one replica's step calls inside the context."""
    with _hooks_of_steps, replaced(_layer_calls, step=step):
        yield


@as_hook
def _hook_call(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    calls, step = _layer_calls.calls, _layer_calls.step
    if calls is not None:
        outputs = original(self, *args, **kwargs)
        inputs = _to_numpy((args, kwargs))
        calls.append(_Called(self, inputs, _to_numpy(outputs)))
        return outputs
    if (
        step is None
        or step is not current_step()
        or keras_internals.innermost_call() is not None
    ):
        return original(self, *args, **kwargs)
    outputs = original(self, *args, **kwargs)
    if (
        step.kinds.is_new(self)
        and _has_code_of_users(self)
        and step.runner.may_probe(self)
    ):
        training = kwargs.get("training")
        _look(step, LayerCall(self, args, kwargs, training))
    return outputs


# Removed when no step is watched, because it makes each call slower.
_hooks_of_steps = SharedHooks((keras.Layer, "__call__", _hook_call))


def _has_code_of_users(layer: keras.Layer) -> bool:
    """Returns whether a layer has parts other than Keras' own layers."""
    for each in layer._flatten_layers():
        cls = type(each)
        if not keras_internals.is_of_keras(cls) or cls.__name__ in _OF_USERS:
            return True
        operations = getattr(each, "operations", ())
        if not all(isinstance(x, keras.Layer) for x in operations):
            return True
    return False


def _look(step: ReplicaStep, call: LayerCall) -> None:
    """Warns if rows depend on each other in a layer."""
    attempts = [probe.Attempt(shift=False, own=True)]
    if keras_internals.in_tf_graph():
        sizes = (8, 32)
        attempts = [probe.Attempt(shift=False, size=size) for size in sizes]
    with probe.nothing_kept(step, call.layer):
        for attempt in attempts:
            try:
                found = _coupled(step, call, attempt)
            except Exception:
                # The user's code may refuse another number of rows, or need the
                # other replicas: then nothing is known.
                continue
            break
        else:
            return
    if found is not None:
        step.kinds.warn_of_coupling(step.strategy, found)


def _coupled(
    step: ReplicaStep, call: LayerCall, attempt: probe.Attempt
) -> keras.Layer | None:
    """Returns the innermost layer that couples rows, or `None`."""
    draws = probe.ProbedDraws()

    def observed(part: slice, alone: int | None = None) -> list[Any]:
        args, kwargs = probe.made_up(
            step, call, attempt, probe.FEW_ROWS, part, alone
        )
        with (
            drawn_by(draws.of(part, probe.FEW_ROWS)),
            opened(probe.ProbeScope(step, call, attempt.shift)),
        ):
            return _to_numpy(call.again(args, kwargs))

    def recorded(part: slice) -> list[_Called]:
        calls: list[_Called] = []
        with replaced(_layer_calls, calls=calls):
            observed(part)
        return calls

    are_apart = functools.partial(_are_apart, probe.tolerance_of(call.layer))
    whole, first, second = map(observed, _PARTS)
    if not are_apart(whole, first, second):
        return None
    again = observed(_PARTS[0])
    if any(_differ(*pair, 1e-4) for pair in zip(whole, again, strict=True)):
        # The layer draws random numbers by other means than Keras'.
        return None
    if _takes_any_lengths(call, observed):
        # Each array may have another length, and such a batch is not split.
        return None
    for calls in zip(*map(recorded, _PARTS), strict=False):
        if are_apart(*(x.outputs for x in calls)) and not are_apart(
            *(x.inputs for x in calls)
        ):
            return calls[0].layer
    return call.layer


def _takes_any_lengths(
    call: LayerCall, observed: Callable[[slice, int], list[Any]]
) -> bool:
    """Returns whether several inputs may have different numbers of rows."""
    leaves = tree.flatten((call.args, call.kwargs))
    places = [
        place
        for place, leaf in enumerate(leaves)
        if ops.is_tensor(leaf) and len(leaf.shape) and leaf.shape[0] is None
    ]
    tolerance = probe.tolerance_of(call.layer)

    def keeps_rows(place: int) -> bool:
        whole, first, second = (observed(part, place) for part in _PARTS)
        return not _are_apart(tolerance, whole, first, second, True)

    try:
        return len(places) > 1 and all(map(keeps_rows, places))
    except Exception:
        # The layer refuses inputs of different lengths.
        return False


def _are_apart(
    tolerance: float,
    whole: list[Any],
    first: list[Any],
    second: list[Any],
    keep_values: bool = False,
) -> bool:
    """Returns whether two halves' outputs differ from those of the whole."""
    return len(whole) == len(first) == len(second) and any(
        _is_apart(*arrays, tolerance)
        or (keep_values and arrays[0].shape == arrays[1].shape)
        and _differ(arrays[0], arrays[1], tolerance)
        for arrays in zip(whole, first, second, strict=True)
    )


def _is_apart(whole: Any, first: Any, second: Any, tolerance: float) -> bool:
    if whole.dtype.kind != "f" or whole.ndim != first.ndim:
        return False
    axes = [
        axis
        for axis in range(whole.ndim)
        if whole.shape[axis] != first.shape[axis]
    ]
    if not axes or first.shape != second.shape:
        return False
    if len(axes) > 1:
        # Two axes of rows: a value for each pair of rows.
        return True
    if whole.shape[axes[0]] != 2 * first.shape[axes[0]]:
        return False
    joined = np.concatenate([first, second], axes[0])
    if not _differ(whole, joined, tolerance):
        return False
    # Rows may come in another order, such as two views of each in turn.
    ordered = _sorted(whole, axes[0]), _sorted(joined, axes[0])
    return _differ(*ordered, tolerance)


def _differ(one: Any, other: Any, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype.kind != "f":
        return bool(one.shape != other.shape)
    if not (np.all(np.isfinite(one)) and np.all(np.isfinite(other))):
        return False
    size = np.max(np.abs([one, other]), initial=0.0)
    return bool(np.max(np.abs(one - other), initial=0.0) > tolerance * size)


def _sorted(array: Any, axis: int) -> Any:
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    weights = np.random.default_rng(2).normal(size=rows.shape[1])
    return rows[np.argsort(rows @ weights)]


def _to_numpy(values: Any) -> list[Any]:
    arrays = []
    for value in tree.flatten(values):
        if ops.is_tensor(value):
            value = ops.convert_to_numpy(ops.cast(value, "float32"))
            arrays.append(np.asarray(value, "float64"))
    return arrays
