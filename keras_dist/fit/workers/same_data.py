"""Checks that workers that train together read the same batches.

Each takes its own rows of a global batch, so rows would be lost without a sign.
Workers compare a fingerprint of the first batch that each of them reads.
"""

import contextlib
import functools
import math
import os
import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.core.rows import OwnRows
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit.workers.iterators import first_pass_wrapped
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.workers import Workers

# The environment variable that switches the check off, if it is 0.
VARIABLE = "KERAS_DIST_CHECK_DATA"

# Largest number of values of an array in a fingerprint.
_MOST = 1 << 14
_ROWS = 32
# Means are sent as integers, multiplied by the scale. They may differ by the
# tolerance, because other hardware rounds differently.
_SCALE = 1e9
_TOLERANCE = 1000
_SIZE = 4
# Values of an array of floats that count in the order of batches.
_GLANCED = 256
_LARGEST = 1e100
_SHOWN = 4


def is_wanted() -> bool:
    """Returns whether the user allows the comparison of data."""
    return os.environ.get(VARIABLE, "1") != "0"


def fingerprint(data: object, rows: int = _ROWS) -> list[int]:
    """Returns four integers below 2**31 that tell one batch from another.

    Floats count by weighted means, since other hardware rounds differently.
    Only the first and last `rows` rows count.
    """
    form, exact, means = 0, 0, np.zeros(2)
    leaves = keras.tree.flatten(data)
    for leaf in leaves:
        values = _values(leaf, rows)
        shape = getattr(leaf, "shape", None) or ()
        form = zlib.crc32(repr((values.dtype.kind, *shape[1:])).encode(), form)
        if values.dtype.kind in "fc":
            means += _means(values)
        else:
            exact = zlib.crc32(values.tobytes(), exact)
    form = zlib.crc32(repr(len(leaves)).encode(), form)
    rounded = np.rint(means / max(len(leaves), 1) * _SCALE).astype("int64")
    return [form >> 1, exact >> 1, *rounded.tolist()]


class SeenOrder:
    """A mark of batches, and of the order in which they were read.

    Of each batch, a few values of its first row count.
    """

    def __init__(self) -> None:
        self._count = 0
        self._code = 0
        self._mean = 0.0

    @staticmethod
    def joined(orders: Sequence["SeenOrder"]) -> list[int]:
        """Returns how many batches were seen, a checksum and a sum of means."""
        codes = repr([order._code for order in orders])
        mean = sum(order._mean for order in orders)
        count = sum(order._count for order in orders)
        return [count, zlib.crc32(codes.encode()) >> 1, round(mean * _SCALE)]

    def noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields batches, of which it notes each."""
        # The pass begins at once, as Keras does it: a loader draws then.
        return map(self._noted, batches)

    def _noted(self, batch: Any) -> Any:
        self._count += 1
        # A weight for each place, so that the order counts.
        weight = math.sin(self._count)
        for leaf in keras.tree.flatten(batch):
            values = _first_row(leaf)[:_GLANCED]
            if values.dtype.kind in "fc":
                numbers = np.nan_to_num(np.real(values).astype("float64"))
                numbers = numbers.clip(-_LARGEST, _LARGEST)
                mean = numbers @ _weights()[0, : numbers.size]
                size = float(np.abs(numbers).sum()) or 1.0
                self._mean += weight * float(mean) / size
            else:
                self._code = zlib.crc32(values.tobytes(), self._code)
        return batch


def _first_row(leaf: Any) -> np.ndarray:
    if not getattr(leaf, "shape", None):
        return _as_numpy(leaf).ravel()
    try:
        row = np.asarray(leaf[:1])
    except (RuntimeError, TypeError):  # a dtype that NumPy lacks, or no slices
        return _values(leaf, 1)
    return row.ravel() if row.dtype.kind in "biufc" else _values(leaf, 1)


def check_order(everyone: Sequence[Sequence[int]]) -> None:
    """Compares what tells the order of the rows that workers have read.

    Args:
        everyone: For each worker a checksum of the rows that were chosen by
            indices, and the numbers of `SeenOrder.joined`.
    """
    *first, mean = everyone[0]
    _, count, _ = first
    others = [
        str(worker)
        for worker, (*numbers, other) in enumerate(everyone)
        if numbers != first or abs(other - mean) > _TOLERANCE * count
    ]
    if others:
        raise ReplicaDivergenceError(
            "Workers have read rows in different orders, so some rows were "
            "left out, and others read twice. Received: other rows on worker "
            f"{', '.join(others)} than on worker 0, since the first batch, "
            "which was the same. Expected: the same order on every worker. "
            "Give a seed to what shuffles or draws rows: a `torch.Generator`, "
            "`np.random.default_rng(seed)` or `random.Random(seed)` of its own "
            "in each sampler and each `PyDataset`."
        )


def check_arrays(
    arguments: Mapping[str, Any], workers: Workers, rows: int | None = None
) -> None:
    """Compares arrays that workers are about to use, in one collective."""
    numbers = fingerprints(arguments, rows)
    compare(arguments, workers.concatenate_numbers(numbers), workers)


def fingerprints(
    arguments: Mapping[str, Any], rows: object = None
) -> list[int]:
    """Returns the fingerprints of arrays; zeros, if nobody wants to know."""
    if not is_wanted():
        return [0] * (_SIZE * len(arguments))
    rows = rows if isinstance(rows, int) and rows > 0 else _ROWS
    numbers = []
    for value in arguments.values():
        numbers += fingerprint(None if is_read(value) else value, rows)
    return numbers


def data_watched(
    data: Mapping[str, Any], executor: Executor, workers: Workers
) -> contextlib.AbstractContextManager[None]:
    """Compares the first batches of data that is read inside the context."""
    waiting = {name: value for name, value in data.items() if is_read(value)}

    def see(name: str, batch: object) -> None:
        numbers = workers.concatenate_numbers(fingerprint(batch))
        compare({name: batch}, numbers, workers)

    def wrapping(data: object, adapter: Any) -> Callable[[Any], Any] | None:
        """Returns a wrapper of the batches of `data`, once; else `None`."""
        for name, value in waiting.items():
            if value is data:
                del waiting[name]
                see_batch = functools.partial(see, name)
                probe = getattr(adapter, "probe", None)
                if probe is not None:
                    see_batch(probe())
                    return None
                return lambda batches: executor.watch_first(batches, see_batch)
        return None

    return first_pass_wrapped(wrapping) if waiting else contextlib.nullcontext()


def is_read(data: object) -> bool:
    """Returns whether data must be read to be known, unlike arrays."""
    at_hand = (list, tuple, dict, str, int, float, np.generic, type(None))
    return not isinstance(data, at_hand) and not hasattr(data, "shape")


def compare(
    values: Mapping[str, Any], fingerprints: Sequence[Any], workers: Workers
) -> None:
    """Compares the fingerprints that all workers have told each other."""
    everyone = np.array(fingerprints, "int64").reshape(-1, len(values), _SIZE)
    apart = np.abs(everyone - everyone[:1])
    differs = (apart[..., :2] > 0).any(-1) | (apart[..., 2:] > _TOLERANCE).any(
        -1
    )
    if not differs.any():
        return
    column = int(np.argmax(differs.any(axis=0)))
    name = list(values)[column]
    others = ", ".join(str(i) for i in np.flatnonzero(differs[:, column]))
    raise ReplicaDivergenceError(
        "Workers were given different data, but all of them must read the "
        "same batches.\nEach worker takes its own rows from these. Received: "
        f"another `{name}` on worker {others} than on worker 0. "
        f"{_shown(values[name], workers)} Expected: the same data in the same "
        "order on every worker, in batches of the global size. Don't divide "
        "the data beforehand (`x[rank::size]`, `dataset.shard`, a "
        "`DistributedSampler`). Give a seed to everything that shuffles data "
        "or draws at random. If each worker should read only a part of the "
        "data, use `strategy.distribute_datasets_from_function`. Set "
        f"{VARIABLE}=0 to skip this check."
    )


def _shown(value: object, workers: Workers) -> str:
    """Returns a sentence with the first numbers of this worker's data."""
    here = f"On worker {workers.cluster.index}"
    for leaf in keras.tree.flatten(value):
        if leaf is not None:
            first = _values(leaf, 1).ravel()[:_SHOWN].tolist()
            return f"{here} it begins with {first}."
    return f"{here} it is empty."


def _values(leaf: Any, rows: int) -> np.ndarray:
    """Returns some values of a leaf, from its first and its last rows."""
    if isinstance(leaf, OwnRows):
        return np.array([leaf.code, len(leaf)])
    shape = getattr(leaf, "shape", None)
    if leaf is None or shape is None or not len(shape):
        return _as_numpy(leaf).ravel()
    if any(size is None for size in shape):  # ragged
        return np.zeros(0)
    row = int(np.prod(shape[1:], dtype="int64"))
    count = min(rows, int(shape[0]), max(1, _MOST // max(row, 1)))
    at = getattr(leaf, "iloc", leaf)
    try:
        parts = [at[:count], at[max(int(shape[0]) - count, 0) :]]
        arrays = [_as_numpy(part).ravel()[:_MOST] for part in parts]
    except (IndexError, KeyError, NotImplementedError, TypeError, ValueError):
        # Some arrays can't be sliced, such as sparse tensors.
        return np.zeros(0)
    return np.concatenate(arrays)


def _as_numpy(value: object) -> np.ndarray:
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    elif hasattr(value, "toarray"):
        value = value.toarray()
    array = np.asarray(value)
    if array.dtype.kind in "biufcSU":
        return array
    if array.dtype.kind == "O":
        return np.array([str(element) for element in array.ravel()])
    if array.dtype.kind == "V":  # such as bfloat16
        return array.astype("float32")
    return array.view("int64")  # dates


def _means(values: np.ndarray) -> np.ndarray:
    """Returns two weighted means, relative to the mean size of the values."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    numbers = np.nan_to_num(values).astype("float64")
    largest = np.abs(numbers).max(initial=0.0)
    if not largest:
        return np.zeros(2)
    numbers = numbers / largest
    weights = _weights()[:, : numbers.size]
    means: np.ndarray = weights @ numbers / np.abs(numbers).sum()
    # So that batches that differ only by a factor are told apart.
    means += np.log1p(largest) * 1e-3
    return means


@functools.cache
def _weights() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (2, 2 * _MOST))
