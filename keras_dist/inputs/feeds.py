"""Feeds: steps of data, with a part for each replica, from sources."""

import itertools
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.core.nests import always
from keras_dist.core.nests import map_nest
from keras_dist.core.nests import named_leaves
from keras_dist.core.nests import regroup
from keras_dist.core.rows import bounds
from keras_dist.core.rows import check_rows
from keras_dist.core.rows import describe
from keras_dist.core.rows import shape_of
from keras_dist.core.rows import sliceable
from keras_dist.inputs.sources.choice import TensorFlowSource
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.source import adapter_of
from keras_dist.inputs.sources.source import like
from keras_dist.inputs.sources.source import own_memory


class Feed(ABC):
    """Steps of data, each with a nest of arrays for every replica."""

    restarts: bool

    @abstractmethod
    def steps(self) -> Iterator[list[Any]]:
        """Begins a pass; yields lists of nests, in replica order."""

    @property
    @abstractmethod
    def cardinality(self) -> int:
        """Number of steps, -1 if they never end, -2 if unknown."""

    @property
    @abstractmethod
    def spec(self) -> Any:
        """A nest of `keras.KerasTensor`s like one replica's part."""

    def keras_data(self, own_rows: bool = False) -> Any:
        """Returns the same rows in global batches, in a form for `fit`.

        With `own_rows`, these may have the rows of this worker only.
        """
        return adapter_of(self.batches, self.restarts, self.cardinality)

    def batches(self) -> Iterator[Any]:
        """Begins a pass; yields the rows of all replicas here as one batch."""
        return map(_joined, self.steps())

    @property
    def rows(self) -> int:
        """The rows of each step; 0 if that is not known without reading."""
        return 0

    @property
    def leaves_out(self) -> bool:
        """True if an incomplete last step is left out, not filled up."""
        return False


class SourceFeed(Feed):
    """A feed that reads one source, for a number of replicas."""

    def __init__(self, source: Source, parts: int) -> None:
        self.restarts = source.restarts
        self._source = source
        self._parts = parts

    @property
    def cardinality(self) -> int:
        return self._source.cardinality

    @property
    def spec(self) -> Any:
        return self._source.spec


class GlobalFeed(SourceFeed):
    """A feed of global batches, split over replicas if there are several."""

    def __init__(
        self, source: Source, parts: int, local_parts: slice = slice(None)
    ) -> None:
        if parts > 1:
            source.check_batched()
        super().__init__(source, parts)
        self._local_parts = local_parts

    def steps(self) -> Iterator[list[Any]]:
        return map(self.split, self._source.read())

    def split(self, batch: object) -> list[Any]:
        """Splits a global batch into parts for this worker's replicas."""
        if self._parts == 1:
            return [batch]
        return cut(batch, self._parts, self._local_parts)

    def trace(self) -> Any:
        """Returns the data to iterate over in a `tf.function`, or `None`."""
        return self._source.trace()

    @property
    def spec(self) -> Any:
        return map_nest(self._part_spec, self._source.spec)

    def _part_spec(self, leaf: object) -> Any:
        if self._parts == 1 or not shape_of(leaf):
            return leaf
        rows, *others = shape_of(leaf)
        if rows is not None:
            rows = None if rows % self._parts else rows // self._parts
        return like(leaf, (rows, *others))

    def keras_data(self, own_rows: bool = False) -> Any:
        return self._source.keras_data()


class ShardFeed(SourceFeed):
    """A feed of a worker's own batches, which have the global size.

    Batches are split as if over all workers, with a step for each part: a
    smaller batch gives fewer steps, not smaller ones.
    """

    _source: TensorFlowSource

    def __init__(
        self, source: TensorFlowSource, num_workers: int, parts: int
    ) -> None:
        source.check_batched()
        super().__init__(source, parts)
        self._num_workers = num_workers

    def steps(self) -> Iterator[list[Any]]:
        # If sizes vary, a whole batch has the largest size so far.
        size = self._source.batch_size
        for batch in self._source.read():
            rows = check_rows(batch)
            size = max(size, rows)
            edges = bounds(size, self._num_workers)
            batch = map_nest(sliceable, batch)
            for start, stop in itertools.pairwise(edges):
                if start < min(stop, rows):
                    step = rows_of(batch, slice(start, stop))
                    yield cut(step, self._parts)

    @property
    def cardinality(self) -> int:
        return INFINITE if self._source.cardinality == INFINITE else UNKNOWN

    @property
    def rows(self) -> int:
        rows, rest = divmod(self._source.rows, self._num_workers)
        return 0 if rest else rows

    @property
    def spec(self) -> Any:
        def of_any_rows(leaf: object) -> Any:
            if not shape_of(leaf):
                return leaf
            return like(leaf, (None, *shape_of(leaf)[1:]))

        return map_nest(of_any_rows, self._source.spec)


class TurnsFeed(SourceFeed):
    """A feed whose replicas take the elements of one source in turn."""

    def steps(self) -> Iterator[list[Any]]:
        # Copies, because some generators fill one array again and again
        # while the elements of a step are collected.
        elements = (map_nest(own_memory, e) for e in self._source.read())
        while step := list(itertools.islice(elements, self._parts)):
            missing = self._parts - len(step)
            if missing and self._source.has_static_rows:
                return
            yield step + [empty(step[0]) for _ in range(missing)]

    @property
    def cardinality(self) -> int:
        count = self._source.cardinality
        if count < 0:
            return count
        steps, rest = divmod(count, self._parts)
        return steps + bool(rest and not self._source.has_static_rows)

    @property
    def rows(self) -> int:
        return self._parts * self._source.rows

    @property
    def leaves_out(self) -> bool:
        is_known = self._source.known_spec() is not None
        return is_known and self._source.has_static_rows


class ParallelFeed(Feed):
    """Several feeds side by side, each for `parts` replicas, in order."""

    def __init__(self, feeds: Sequence[Feed], parts: int = 1) -> None:
        self.restarts = all(feed.restarts for feed in feeds)
        self._feeds = tuple(feeds)
        self._parts = parts

    def steps(self) -> Iterator[list[Any]]:
        passes = [feed.steps() for feed in self._feeds]
        for step in itertools.zip_longest(*passes):
            if None in step and self.leaves_out:
                return
            filled = next(
                worker_parts
                for worker_parts in step
                if worker_parts is not None
            )
            rest = [empty(filled[0])] * self._parts
            yield [
                p
                for worker_parts in step
                for p in (rest if worker_parts is None else worker_parts)
            ]

    @property
    def cardinality(self) -> int:
        counts = [feed.cardinality for feed in self._feeds]
        if len(set(counts)) == 1:
            return counts[0]
        if UNKNOWN in counts:
            return UNKNOWN
        if self.leaves_out:
            return min(count for count in counts if count != INFINITE)
        return INFINITE if INFINITE in counts else max(counts)

    @property
    def leaves_out(self) -> bool:
        return any(feed.leaves_out for feed in self._feeds)

    @property
    def rows(self) -> int:
        rows = {feed.rows for feed in self._feeds}
        return len(self._feeds) * rows.pop() if len(rows) == 1 else 0

    @property
    def spec(self) -> Any:
        return self._feeds[0].spec


class EvenStep(list[Any]):
    """A step with as many rows for each replica of all workers."""


def cut(
    batch: object, parts: int, local_parts: slice = slice(None)
) -> list[Any]:
    """Splits the rows of a global batch over replicas, in order."""
    edges = bounds(check_rows(batch), parts)
    batch = map_nest(sliceable, batch)
    shares = list(zip(edges[:-1], edges[1:], strict=True))
    step = [rows_of(batch, slice(*share)) for share in shares[local_parts]]
    # In a graph of TensorFlow, the number of rows is not known.
    is_even = isinstance(edges[-1], int) and edges[-1] % parts == 0
    return EvenStep(step) if is_even else step


def rows_of(batch: object, rows: slice) -> Any:
    def cut_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        try:
            return leaf[rows]
        except TypeError as error:
            where = next(p for p, x in named_leaves(batch) if x is leaf)
            raise ValueError(
                "A batch can't be split into rows. Received: "
                f"{describe(where, leaf)}, a {type(leaf).__name__}. Expected: "
                "arrays or dense tensors."
            ) from error

    return map_nest(cut_leaf, batch)


def empty(element: object) -> Any:
    """Returns an element with 0 rows, for a replica without data."""
    return map_nest(lambda leaf: leaf[:0] if shape_of(leaf) else leaf, element)


def _joined(step: list[Any]) -> Any:
    def join(parts: Sequence[Any]) -> Any:
        if parts[0] is None:
            return None
        return np.concatenate([_on_host(part) for part in parts])

    return regroup(step, join, always)


def _on_host(leaf: object) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    return keras.ops.convert_to_numpy(leaf)
