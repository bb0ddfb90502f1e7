"""The rows of a global batch that a worker loads, and the order of rows."""

import dataclasses
import os
import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist.core import nests
from keras_dist.core.rows import shape_of
from keras_dist.plugin.executor import Executor

# Makes what a backend reads of rows that are here, the place of the first, the
# number of all rows, and a checksum of these.
MakeLeaf = Callable[[Any, Any, Any, Any], Any]
# The environment variable by which workers read all rows, if it is 0.
VARIABLE = "KERAS_DIST_OWN_ROWS"
# How many of a batch's indices count in a checksum.
_MOST = 4096


def is_wanted() -> bool:
    """Returns whether the user allows that workers load different rows."""
    return os.environ.get(VARIABLE, "1") != "0"


class Shares:
    """The rows that this worker loads, by the rows of a global batch."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._known: dict[int, range] = {}

    @property
    def first_replica(self) -> int:
        """The first of this worker's replicas."""
        return self._executor.plan.first_replica

    def of(self, total: int) -> range:
        """Returns the rows of a batch of `total` rows: one, at least."""
        if total not in self._known:
            # The backend's own rule, which may give replicas the same rows.
            everyone = self._executor.rows_in_fit(np.zeros((total, 0)))
            count = self._executor.plan.num_local_replicas
            mine = everyone[self.first_replica :][:count]
            rows = [share for share in mine if share]
            # Without rows, a replica computes some row, which counts nowhere.
            own = range(rows[0].start, rows[-1].stop) if rows else range(1)
            self._known[total] = own
        return self._known[total]


@dataclasses.dataclass(frozen=True)
class Taken:
    """The rows that were taken of one batch.

    Args:
        first: Integer, the place of the first row in the global batch.
        count: Integer, the rows that are here.
        total: Integer, the rows of the global batch.
        code: Integer below 2**31, a checksum of the indices of all rows.
    """

    first: int
    count: int
    total: int
    code: int

    @classmethod
    def of(cls, own: range, total: int, code: int) -> "Taken":
        return cls(own.start, len(own), total, code)

    @classmethod
    def read(cls, numbers: Any) -> "Taken":
        # Of a tensor, in one call.
        numbers = getattr(numbers, "tolist", lambda: numbers)()
        return cls(*map(int, numbers))

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The numbers that travel with a batch, also between processes."""
        return self.first, self.count, self.total, self.code

    def leaves(self, batch: object, make: MakeLeaf) -> Any:
        """Gives a batch's arrays the shape of the global batch."""
        if self.count == self.total:
            return batch

        def leaf_of(rows: Any) -> Any:
            if not shape_of(rows):
                return rows
            return make(rows, self.first, self.total, self.code)

        return nests.map_nest(leaf_of, batch)

    def check(self, batch: object) -> None:
        """Raises `ValueError` if an array of a batch has other rows."""
        for leaf in nests.leaves_of(batch):
            shape = shape_of(leaf)
            if shape and shape[0] != self.count:
                raise ValueError(
                    "A batch of own rows has an array of another length.\n"
                    f"Received: an array of shape {shape}, where rows "
                    f"{self.first} to {self.first + self.count} of "
                    f"{self.total} were asked for. Expected: {self.count} rows "
                    "in each array. In a `PyDataset`, take `own` of all that "
                    "a batch is made of; a `collate_fn` must give a row for "
                    "each of its rows."
                )


class RowOrder:
    """A checksum of the rows that a source has given, in their order.

    Args:
        size: Integer, the batches of a pass; `None` if it is not known.
        is_ahead: Boolean, whether batches are read before they are asked for:
            then only passes count that a trainer has read to their end. That
            is not known of passes of which it takes a part.
    """

    def __init__(self, size: int | None, is_ahead: bool) -> None:
        self._size = size
        self.is_ahead = is_ahead
        self._code = 0
        self._ended = 0
        self._is_within = False
        # The checksums at the ends of passes.
        self._passes: list[int] = []

    @property
    def code(self) -> int:
        """Below 2**31, and equal on all workers between two epochs."""
        if not self.is_ahead:
            return self._code >> 1
        ended = min(self._ended, len(self._passes))
        return self._passes[ended - 1] >> 1 if ended else 0

    def begin(self) -> None:
        """A trainer begins a pass."""
        self._is_within = True

    def end(self) -> None:
        """A trainer has ended a pass, if it has begun one."""
        self._ended += self._is_within
        self._is_within = False

    def noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields pairs of batches and numbers of `Taken`, and notes these."""
        # At once, as Keras does it: a loader draws when a pass begins.
        return self._noted(iter(batches))

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        count, code = 0, self._passes[-1] if self._passes else 0
        for batch, numbers in batches:
            taken = Taken.read(numbers)
            taken.check(batch)
            self.note(taken.code)
            count, code = count + 1, _joined(code, taken.code)
            if count == self._size:
                self._passes.append(code)
            yield batch, numbers
        if count and self._size is None:
            self._passes.append(code)

    def note(self, code: int) -> None:
        """Adds a batch to the checksum."""
        self._code = _joined(self._code, code)


def _joined(code: int, other: int) -> int:
    return zlib.crc32(other.to_bytes(4, "little"), code)


def code_of(indices: Any) -> int:
    """Returns a checksum of a batch's indices, below 2**31.

    What is no list of integers or texts counts by its length only.
    """
    ids = np.asarray(indices) if _is_plain(indices) else np.zeros(0)
    is_index = ids.ndim == 1 and ids.dtype.kind in "iuSU"
    seen = ids[:_MOST] if is_index else np.array([len(indices)])
    return zlib.crc32(seen.tobytes()) >> 1


def _is_plain(indices: Any) -> bool:
    if isinstance(indices, (range, np.ndarray)):
        return True
    is_list = isinstance(indices, Sequence) and not isinstance(indices, str)
    kinds = set(map(type, indices)) if is_list else ()
    return is_list and all(issubclass(kind, (int, str)) for kind in kinds)


class OwnTaker:
    """The callable `own` for one batch: takes this worker's rows of anything.

    It is handed to a `PyDataset`'s `__getitem__`.
    """

    def __init__(
        self, shares: Shares | None, part: Callable[[], None] = lambda: None
    ) -> None:
        # `None` for all rows.
        self._shares = shares
        # Called before workers load different rows.
        self._part = part
        self.taken: Taken | None = None

    def __call__(self, rows: Any) -> Any:
        """Returns the items of a sequence, one for each row, that are own."""
        total = len(rows)
        if self.taken is None:
            if not total:
                raise ValueError(
                    "`own` was called with an empty sequence. Expected: one "
                    "item for each row of the global batch."
                )
            whole = range(total)
            own = whole if self._shares is None else self._shares.of(total)
            self.taken = Taken.of(own, total, code_of(rows))
            if len(own) < total:
                self._part()
        if total != self.taken.total:
            raise ValueError(
                "`own` was called with sequences of different lengths. "
                f"Received: {self.taken.total} items, then {total}. Expected: "
                "one item for each row of the global batch."
            )
        start = self.taken.first
        part = slice(start, start + self.taken.count)
        return getattr(rows, "iloc", rows)[part]
