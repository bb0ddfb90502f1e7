"""Comparison of the results of a step on one device and under the strategy."""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist.verification.report import Difference
from keras_dist.verification.runs import Key
from keras_dist.verification.runs import RecordedStep

# Differences that count as rounding, by the dtype that a model computes in:
# relative to the largest entry, after one step and after several.
_TOLERANCES = {
    "float64": (1e-7, 1e-6),
    "float32": (1e-4, 1e-3),
    "float16": (2e-2, 5e-2),
    "bfloat16": (6e-2, 1e-1),
}
# Allowed multiple of the difference that another order of rows makes on one
# device: replicas sum in yet another order.
_OF_NOISE = 8.0
# Gradients below this fraction of the model's largest one are rounding.
_OF_LARGEST = 1e-6


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that count as rounding."""

    once: float  # after one step
    trained: float  # after several
    epsilon: float  # spacing of numbers in the variables' dtype

    @classmethod
    def of(cls, model: keras.Model) -> "Tolerance":
        """Returns the tolerance for the least exact dtype of any layer."""
        types = [layer.compute_dtype for layer in model._flatten_layers()]
        known = [_TOLERANCES[t] for t in types if t in _TOLERANCES]
        once, trained = max(known, default=_TOLERANCES["float32"])
        kinds = [v.dtype for v in model.trainable_variables]
        low = any(kind in ("float16", "bfloat16") for kind in kinds)
        return cls(once, trained, 1e-2 if low else 2.4e-7)


def compare(
    own: RecordedStep,
    other: RecordedStep,
    noisy: RecordedStep | None,
    tolerance: Tolerance,
) -> list[Difference]:
    """Compares each value of a step; `noisy` is `own` with reordered rows."""
    least = _least(own)
    return [
        _difference(own, other, noisy, key, tolerance, least)
        if key in own.found and key in other.found
        else _of_one_side(own, other, key)
        for key in dict.fromkeys((*own.found, *other.found))
    ]


def _of_one_side(
    own: RecordedStep, other: RecordedStep, key: Key
) -> Difference:
    """Returns the difference of a value that only one of the steps has."""
    is_own = key in own.found
    value = _floats((own if is_own else other).found[key]).reshape(-1)
    first = float(value[0]) if value.size else 0.0
    return Difference(
        *key,
        own.phase,
        own.index,
        own.rows,
        one_device=first if is_own else np.nan,
        strategy=np.nan if is_own else first,
        relative=np.inf,
        allowed=0.0,
        only="one_device" if is_own else "strategy",
    )


def _difference(
    step: RecordedStep,
    other: RecordedStep,
    noisy: RecordedStep | None,
    key: Key,
    tolerance: Tolerance,
    least: float,
) -> Difference:
    kind, name = key
    own, theirs = _floats(step.found[key]), _floats(other.found[key])
    before = _floats(step.before.get(key, 0.0))
    is_kept = kind in ("state", "weight", "slot")
    is_trained = step.phase in ("training", "fit")
    scale = _largest(own - before if is_kept else own)
    rounding = _OF_NOISE * tolerance.epsilon * _largest(own) if is_kept else 0.0
    if kind == "gradient":
        rounding = least
    if noisy is not None and key in noisy.found:
        moved = _distance(own, _floats(noisy.found[key]))
        if is_trained or moved <= _most_noise(scale, least):
            rounding += _OF_NOISE * moved
    share = tolerance.trained if is_trained else tolerance.once
    at = _place(own, theirs)
    unit = scale or _largest(own) or 1.0
    return Difference(
        kind,
        name,
        step.phase,
        step.index,
        step.rows,
        float(own.reshape(-1)[at]) if own.size else 0.0,
        float(theirs.reshape(-1)[at]) if theirs.size else 0.0,
        float(_distance(own, theirs) / unit),
        float(share + rounding / unit),
    )


def doubles(once: RecordedStep, twice: RecordedStep, key: Key) -> bool | None:
    """Returns whether a value changes if each row comes twice."""
    if key not in once.found or key not in twice.found:
        return None
    change, changed = (
        _floats(step.found[key]) - _floats(step.before.get(key, 0.0))
        for step in (once, twice)
    )
    return _distance(change, changed) > 1e-2 * (_largest(change) or 1.0)


def depends_on_order(own: RecordedStep, noisy: RecordedStep) -> bool:
    """Returns whether another order of rows changes gradients noticeably."""
    least = _least(own)
    return any(
        key not in noisy.found
        or _distance(_floats(value), _floats(noisy.found[key]))
        > _most_noise(_largest(value), least)
        for key, value in own.found.items()
        if key[0] == "gradient"
    )


def without_gradient(step: RecordedStep) -> set[str]:
    """Returns the variables whose gradients are 0, but for rounding."""
    least = _least(step)
    return {
        name
        for (kind, name), value in step.found.items()
        if kind == "gradient" and _largest(value) <= least
    }


def is_of(key: Key, names: set[str]) -> bool:
    """Returns whether a value is one of these weights, or a slot of one."""
    kind, name = key
    if kind == "slot":
        return any(each.replace("/", "_") in name for each in names)
    return kind == "weight" and name in names


def _least(step: RecordedStep) -> float:
    """Returns the size below which gradients of a step are rounding."""
    gradients = [v for k, v in step.found.items() if k[0] == "gradient"]
    return _OF_LARGEST * max(map(_largest, gradients), default=0.0)


def _most_noise(scale: float, least: float) -> float:
    """Returns the largest effect of reordered rows that may be rounding."""
    return 1e-2 * max(scale, 1e3 * least)


def _floats(value: object) -> Any:
    return np.asarray(value, "float64")


def _largest(value: Any) -> float:
    value = _floats(value)
    finite = value[np.isfinite(value)]
    return float(np.max(np.abs(finite))) if finite.size else 0.0


def _distance(own: Any, theirs: Any) -> float:
    """Returns the largest difference; infinite if NaN or shapes differ."""
    if own.shape != theirs.shape:
        return np.inf
    if not own.size:
        return 0.0
    odd = ~(np.isfinite(own) & np.isfinite(theirs))
    if odd.any():
        same = (own == theirs) | (np.isnan(own) & np.isnan(theirs))
        if not same[odd].all():
            return np.inf
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(np.where(odd, 0.0, own - theirs))))


def _place(own: Any, theirs: Any) -> int:
    if own.shape != theirs.shape or not own.size:
        return 0
    with np.errstate(invalid="ignore"):
        gap = np.abs(own - theirs).reshape(-1)
    return int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
