"""Finds variables whose values are not the same on all workers."""

import zlib
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit.workers.agreement import first_of
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.workers import Workers
from keras_dist.replica.on_read import SyncOnReadVariable
from keras_dist.replica.strategy_core import StrategyBase

# Other hardware rounds differently: values may be apart by so much of the
# variable's largest one.
_TOLERANCE = 1e-4


def comparable(
    variables: Sequence[keras.Variable],
) -> list[keras.Variable]:
    """Returns the variables of which each worker has the whole value.

    A sharded variable is not among them, nor one that is combined when read.
    """
    return [
        variable
        for variable in variables
        if not isinstance(variable, SyncOnReadVariable)
        and variable.dtype != "string"
        and keras_internals.has_value(variable)
    ]


def code_of_state(strategy: StrategyBase, model: keras.Model) -> int:
    """Returns a hash of a model's state, below 2**32; metrics don't count.

    Raises:
        ReplicaDivergenceError: If replicas of this worker have other values.
    """
    workers, plan = strategy.executor.workers, strategy.plan
    if workers is None:
        return 0
    variables = state_of(model)
    code = code_of([keras_internals.value_of(v) for v in variables])
    for index in range(1, plan.num_local_replicas):
        copies = [strategy.executor.storage(v).read(index) for v in variables]
        if code_of(copies) == code:
            continue
        values = [keras_internals.value_of(v) for v in variables]
        if differences := _far(variables, copies, values):
            raise _apart(
                f"replicas of worker {workers.cluster.index}, and on its "
                f"replica {index} these are apart from those of its first one",
                differences,
            )
    return code


def digest_of(model: keras.Model) -> np.ndarray:
    """Returns the mean and the size of each variable of a model's state."""
    digests = []
    for variable in state_of(model):
        value = keras_internals.value_of(variable)
        array = np.asarray(ops.convert_to_numpy(value))
        if array.size:
            size = np.sqrt(np.mean(np.square(array, dtype="float64")))
            digests.append((array.mean(dtype="float64"), size))
    return np.array(digests, "float64").reshape(-1, 2)


def check_digest(
    model: keras.Model, digest: np.ndarray, chiefs: np.ndarray
) -> None:
    """Raises an error if the chief has saved other values than these."""
    variables = [v for v in state_of(model) if np.prod(v.shape)]
    differences = [f"{len(digest)} variables in place of {len(chiefs)}"]
    if len(digest) == len(chiefs):
        differences = _far(variables, digest, chiefs)
    if differences:
        raise _apart(
            "a model that the chief has saved with other values. On this "
            "worker, the means and sizes of these are apart from the saved "
            "ones",
            differences,
        )


def state_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that workers compare; metrics don't count."""
    left_out = keras_saveables.metric_variables(model)
    variables = keras_saveables.all_variables(model)
    variables += getattr(bound(model), "outside", [])
    return comparable([v for v in variables if id(v) not in left_out])


def check_values(
    variables: Sequence[keras.Variable], workers: Workers, when: str
) -> None:
    """Raises an error if workers have other values; all workers call it."""
    values = [keras_internals.value_of(variable) for variable in variables]
    codes = [code_of([value]) for value in values]
    everyone = np.array(
        workers.concatenate_numbers(codes, f"the values of variables {when}")
    ).reshape(-1, len(codes))
    places = np.flatnonzero((everyone != everyone[0]).any(axis=0)).tolist()
    if not places:
        return
    chiefs = workers.broadcast([values[place] for place in places])
    local_distances = [
        _distance(values[place], chief)
        for place, chief in zip(places, chiefs, strict=True)
    ]
    distances = workers.gather(
        [ops.convert_to_tensor(np.array(local_distances))]
    )
    table = np.stack(
        [ops.convert_to_numpy(distance) for (distance,) in distances]
    )
    differences = [
        f"'{variables[place].path}' by {column.max():.3g} on worker "
        f"{int(column.argmax())}"
        for place, column in zip(places, table.T, strict=True)
        if column.max() > 0
    ]
    if differences:
        raise _apart(
            f"other values {when}. These are apart from the chief's",
            differences,
        )


def _far(
    variables: Sequence[keras.Variable],
    values: Iterable[Any],
    others: Iterable[Any],
) -> list[str]:
    """Returns the paths of variables with values that are too far apart."""
    return [
        f"'{variable.path}' by {distance:.3g}"
        for variable, value, other in zip(
            variables, values, others, strict=True
        )
        if (distance := _distance(value, other)) > 0
    ]


def _distance(value: object, other: object) -> float:
    """Returns how far values are apart; 0 if that may be rounding.

    That is infinite where only one is infinite or no number."""
    array, other_array = (
        np.asarray(ops.convert_to_numpy(tensor)).astype("float64")
        for tensor in (value, other)
    )
    same = (array == other_array) | (np.isnan(array) & np.isnan(other_array))
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(
            np.abs(array - other_array), nan=np.inf, posinf=np.inf
        )
    distance = np.where(same, 0.0, apart).max(initial=0.0)
    largest = np.abs(other_array[np.isfinite(other_array)]).max(initial=0.0)
    return 0.0 if distance <= _TOLERANCE * largest else float(distance)


def _apart(of: str, differences: Sequence[str]) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"Variables must be equal everywhere.\nReceived: {of}: "
        f"{first_of(differences)}. Expected: the same values on every worker "
        "and replica. Look for code that only some workers run, for files of "
        "weights that differ, and for random numbers of a worker's own."
    )


def code_of(values: Sequence[Any]) -> int:
    """Returns a hash below 2**32: of bits, or on accelerators of sums."""
    if get_backend().list_devices()[0].type != "cpu":
        sums = [s for value in values for s in _sums(value)]
        values = [ops.stack(sums)] if sums else []
    code = 0
    for value in values:
        array = np.ascontiguousarray(ops.convert_to_numpy(value))
        code = zlib.crc32(array.reshape(-1).view("uint8").data, code)
    return code


def _sums(value: object) -> tuple[Any, Any]:
    numbers = ops.cast(value, "float32")
    return ops.sum(numbers), ops.sum(ops.square(numbers))
