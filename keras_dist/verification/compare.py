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
    reference: RecordedStep,
    other: RecordedStep,
    noisy: RecordedStep | None,
    tolerance: Tolerance,
) -> list[Difference]:
    """Compares each value of a step; `noisy` is `reference` with its rows
    in another order."""
    least = _least(reference)
    return [
        _difference(reference, other, noisy, key, tolerance, least)
        if key in reference.values and key in other.values
        else _of_one_side(reference, other, key)
        for key in dict.fromkeys((*reference.values, *other.values))
    ]


def _of_one_side(
    reference: RecordedStep, other: RecordedStep, key: Key
) -> Difference:
    """Returns the difference of a value that only one of the steps has."""
    is_reference = key in reference.values
    value = _floats((reference if is_reference else other).values[key]).reshape(
        -1
    )
    first = float(value[0]) if value.size else 0.0
    return Difference(
        *key,
        reference.phase,
        reference.index,
        reference.rows,
        one_device=first if is_reference else np.nan,
        strategy=np.nan if is_reference else first,
        relative=np.inf,
        allowed=0.0,
        only="one_device" if is_reference else "strategy",
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
    expected, actual = _floats(step.values[key]), _floats(other.values[key])
    before = _floats(step.before.get(key, 0.0))
    is_kept = kind in ("state", "weight", "slot")
    is_trained = step.phase in ("training", "fit")
    scale = _largest(expected - before if is_kept else expected)
    rounding = (
        _OF_NOISE * tolerance.epsilon * _largest(expected) if is_kept else 0.0
    )
    if kind == "gradient":
        rounding = least
    if noisy is not None and key in noisy.values:
        moved = _distance(expected, _floats(noisy.values[key]))
        if is_trained or moved <= _most_noise(scale, least):
            rounding += _OF_NOISE * moved
    share = tolerance.trained if is_trained else tolerance.once
    at = _place(expected, actual)
    unit = scale or _largest(expected) or 1.0
    return Difference(
        kind,
        name,
        step.phase,
        step.index,
        step.rows,
        float(expected.reshape(-1)[at]) if expected.size else 0.0,
        float(actual.reshape(-1)[at]) if actual.size else 0.0,
        float(_distance(expected, actual) / unit),
        float(share + rounding / unit),
    )


def doubles(once: RecordedStep, twice: RecordedStep, key: Key) -> bool | None:
    """Returns whether a value changes if each row comes twice."""
    if key not in once.values or key not in twice.values:
        return None
    change, changed = (
        _floats(step.values[key]) - _floats(step.before.get(key, 0.0))
        for step in (once, twice)
    )
    return _distance(change, changed) > 1e-2 * (_largest(change) or 1.0)


def depends_on_order(step: RecordedStep, noisy: RecordedStep) -> bool:
    """Returns whether another order of rows changes gradients noticeably."""
    least = _least(step)
    return any(
        key not in noisy.values
        or _distance(_floats(value), _floats(noisy.values[key]))
        > _most_noise(_largest(value), least)
        for key, value in step.values.items()
        if key[0] == "gradient"
    )


def without_gradient(step: RecordedStep) -> set[str]:
    """Returns the variables whose gradients are 0, but for rounding."""
    least = _least(step)
    return {
        name
        for (kind, name), value in step.values.items()
        if kind == "gradient" and _largest(value) <= least
    }


def is_of(key: Key, names: set[str]) -> bool:
    """Returns whether a value is one of these weights, or a slot of one."""
    kind, name = key
    if kind == "slot":
        return any(
            variable_name.replace("/", "_") in name for variable_name in names
        )
    return kind == "weight" and name in names


def _least(step: RecordedStep) -> float:
    """Returns the size below which gradients of a step are rounding."""
    gradients = [v for k, v in step.values.items() if k[0] == "gradient"]
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


def _distance(expected: Any, actual: Any) -> float:
    """Returns the largest difference; infinite if NaN or shapes differ."""
    if expected.shape != actual.shape:
        return np.inf
    if not expected.size:
        return 0.0
    odd = ~(np.isfinite(expected) & np.isfinite(actual))
    if odd.any():
        same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
        if not same[odd].all():
            return np.inf
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(np.where(odd, 0.0, expected - actual))))


def _place(expected: Any, actual: Any) -> int:
    if expected.shape != actual.shape or not expected.size:
        return 0
    with np.errstate(invalid="ignore"):
        gap = np.abs(expected - actual).reshape(-1)
    return int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
