"""Checks that all workers call `fit`, `evaluate` or `predict` alike."""

from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

import keras

from keras_dist.errors import ReplicaDivergenceError

if TYPE_CHECKING:
    from keras_dist.plugin.workers import Workers

METHODS = ("fit", "evaluate", "predict")
UNKNOWN = -1
# Numbers travel as 32-bit integers.
_LARGEST = 2**31 - 1
_NUMBERS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "steps",
    "validation_batch_size",
    "validation_freq",
    "validation_steps",
)


def described(method: str, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns what has to be the same on every worker, as integers by name.

    The names are the same for each method. -1 stands for what is not given or
    not known, such as the number of batches of a generator.
    """
    validation = arguments.get("validation_data")
    if isinstance(validation, (tuple, list)) and validation:
        validation = validation[0]
    split = arguments.get("validation_split") or 0.0
    found = {"method": METHODS.index(method)}
    found |= {name: _number(arguments.get(name)) for name in _NUMBERS}
    found["validation_split (in millionths)"] = round(1e6 * split)
    found["shuffle"] = _choice(arguments.get("shuffle"))
    found["rows of the data"] = rows_of(arguments.get("x"))
    found["batches of the data"] = batches_of(arguments.get("x"))
    found["rows of the validation data"] = rows_of(validation)
    found["batches of the validation data"] = batches_of(validation)
    return found


def rows_of(data: Any) -> int:
    """Returns the number of rows of arrays, or -1 for a dataset of batches."""
    if _knows_batches(data):
        return UNKNOWN
    shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(data)]
    rows = [shape[0] for shape in shapes if shape]
    return _number(rows[0] if rows else None)


def batches_of(data: Any) -> int:
    """Returns the number of batches of a dataset that knows it, else -1."""
    if not _knows_batches(data):
        return UNKNOWN
    for name in ("num_batches", "cardinality", "__len__"):
        try:
            found = getattr(data, name, None)
            number = found() if callable(found) else found
        except (TypeError, NotImplementedError):
            # A dataset may have the method without knowing its length.
            continue
        if number is not None:
            return _number(int(number))
    return UNKNOWN


def check_agreement(
    own: Mapping[str, int], workers: "Workers", code: int
) -> bool:
    """Compares the calls that workers are about to make, in one collective.

    `own` comes from `described`. `code` is an integer that may differ.

    Returns:
        Boolean, whether `code` is the same on all workers.

    Raises:
        ReplicaDivergenceError: On every worker, if `own` differs between two.
    """
    numbers = workers.concatenate_numbers([*own.values(), code])
    size = len(own) + 1
    everyone = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    columns = list(zip(*everyone, strict=True))
    differences = [
        f"{name}: " + _told(name, column)
        for name, column in zip(own, columns[:-1], strict=True)
        if len(set(column)) > 1
    ]
    if differences:
        raise ReplicaDivergenceError(
            "Workers are about to do different things, and would wait for "
            f"each other forever. Received: {'; '.join(differences)}. "
            "Expected: the same call with as much data on every worker. Give "
            "each worker the whole data and the global batch size; it takes "
            "its own rows."
        )
    return len(set(columns[-1])) == 1


def _told(name: str, column: tuple[int, ...]) -> str:
    chiefs = column[0]
    index = next(i for i, value in enumerate(column) if value != chiefs)
    values = [_named(name, value) for value in (chiefs, column[index])]
    return f"{values[0]} on worker 0, {values[1]} on worker {index}"


def _named(name: str, value: int) -> str:
    if name == "method":
        return f"`{METHODS[value]}`"
    return "unknown or not given" if value == UNKNOWN else str(value)


def _knows_batches(data: Any) -> bool:
    """Returns whether `data` is a dataset of batches rather than arrays."""
    if isinstance(data, (list, tuple, dict)) or data is None:
        return False
    return not hasattr(data, "shape")


def _number(value: Any) -> int:
    if value is None or isinstance(value, (list, tuple, set)):
        return UNKNOWN if value is None else len(value)
    return int(value) if 0 <= int(value) <= _LARGEST else UNKNOWN


def _choice(value: Any) -> int:
    """Encodes a Keras argument that is a boolean, a string or `None`."""
    return 2 if isinstance(value, str) else int(value is None or bool(value))
