"""Feeds: how the elements of sources become steps, a part for each replica."""

import itertools
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import final

import keras
import numpy as np

from keras_dist.core.leaves import check_rows
from keras_dist.core.leaves import describe
from keras_dist.core.leaves import named_leaves
from keras_dist.core.leaves import shape_of
from keras_dist.core.leaves import sliceable
from keras_dist.core.regroup import always
from keras_dist.core.regroup import map_nest
from keras_dist.core.regroup import regroup
from keras_dist.core.rows import bounds
from keras_dist.inputs.adapters import RepeatableBatches
from keras_dist.inputs.adapters import one_shot_batches
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source


class Feed(ABC):
    """Steps of data; in each, a nest of arrays for each replica.

    Attributes:
        restarts: Whether each pass starts anew.
    """

    restarts: bool

    @abstractmethod
    def steps(self) -> Iterator[list[Any]]:
        """Begins a pass: lists of nests, in replica order."""

    @property
    @abstractmethod
    def cardinality(self) -> int:
        """Number of steps, -1 if they never end, -2 if it is not known."""

    @property
    @abstractmethod
    def spec(self) -> Any:
        """A nest of `keras.KerasTensor`s like one replica's part."""

    def keras_data(self) -> Any:
        """The same rows in global batches, as something that `fit` takes."""

        def batches() -> Iterator[Any]:
            return (_joined(step) for step in self.steps())

        if self.restarts:
            return RepeatableBatches(batches, self.cardinality)
        return one_shot_batches(batches())

    @property
    def leaves_out(self) -> bool:
        """Whether steps that not everybody has data for are left out.

        Else those who have none get arrays of no rows.
        """
        return False


@final
class GlobalFeed(Feed):
    """Global batches, split over the replicas in order.

    Args:
        source: The `Source` of global batches.
        parts: Integer, number of replicas. One gets elements as they are.
        own: Slice, which of them are this worker's. Default all.
    """

    def __init__(
        self, source: Source, parts: int, own: slice = slice(None)
    ) -> None:
        if parts > 1:
            source.check_batched()
        self.restarts = source.restarts
        self._source = source
        self._parts = parts
        self._own = own

    def steps(self) -> Iterator[list[Any]]:
        return map(self.split, self._source.read())

    def split(self, batch: Any) -> list[Any]:
        """A global batch's part for each replica of this worker."""
        if self._parts == 1:
            return [batch]
        return cut(batch, self._parts, self._own)

    def trace(self) -> Any:
        """What an iterator inside of a `tf.function` is made of, or `None`."""
        return self._source.trace()

    @property
    def cardinality(self) -> int:
        return self._source.cardinality

    @property
    def spec(self) -> Any:
        return map_nest(self._part_spec, self._source.spec)

    def _part_spec(self, leaf: Any) -> Any:
        if self._parts == 1 or not shape_of(leaf):
            return leaf
        rows, *others = shape_of(leaf)
        own = None
        if rows is not None and rows % self._parts == 0:
            own = rows // self._parts
        return with_shape(leaf, (own, *others))

    def keras_data(self) -> Any:
        return self._source.keras_data()


@final
class TurnsFeed(Feed):
    """Elements of one source go to the replicas in turn.

    Args:
        source: The `Source` of one replica's batches.
        parts: Integer, number of replicas.
    """

    def __init__(self, source: Source, parts: int) -> None:
        self.restarts = source.restarts
        self._source = source
        self._parts = parts

    def steps(self) -> Iterator[list[Any]]:
        # While a step is collected, its first elements have to last: some
        # generators fill one array again and again.
        elements = map(_kept, self._source.read())
        while step := list(itertools.islice(elements, self._parts)):
            missing = self._parts - len(step)
            if missing and self._source.has_static_rows:
                return
            yield step + [empty(step[0]) for _ in range(missing)]

    @property
    def cardinality(self) -> int:
        count = self._source.cardinality
        if count < 0 or count % self._parts == 0:
            return count if count < 0 else count // self._parts
        return count // self._parts + (not self._source.has_static_rows)

    @property
    def spec(self) -> Any:
        return self._source.spec

    @property
    def leaves_out(self) -> bool:
        is_known = self._source.known_spec() is not None
        return is_known and self._source.has_static_rows


@final
class ParallelFeed(Feed):
    """Several feeds side by side: each replica has one, or each worker.

    Args:
        feeds: Sequence of `Feed`s, in replica order.
        parts: Integer, for how many replicas each of them is.
    """

    def __init__(self, feeds: Sequence[Feed], parts: int = 1) -> None:
        self.restarts = all(feed.restarts for feed in feeds)
        self._feeds = tuple(feeds)
        self._parts = parts

    def steps(self) -> Iterator[list[Any]]:
        passes = [feed.steps() for feed in self._feeds]
        for step in itertools.zip_longest(*passes):
            if None in step and self.leaves_out:
                return
            filled = next(own for own in step if own is not None)
            rest = [empty(filled[0])] * self._parts
            yield [p for own in step for p in (rest if own is None else own)]

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
    def spec(self) -> Any:
        return self._feeds[0].spec


def _kept(element: Any) -> Any:
    """An element that stays as it is while the next one is made."""
    return map_nest(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf,
        element,
    )


def cut(batch: Any, parts: int, own: slice = slice(None)) -> list[Any]:
    """A global batch's rows for each replica, in order.

    Args:
        batch: Nest of arrays with one number of rows; `None` is given to all.
        parts: Integer, number of replicas.
        own: Slice, which of the replicas. Default all.

    Returns:
        List of nests like `batch`. With fewer rows than replicas, some have
        arrays of no rows.

    Raises:
        ValueError: If it is no batch.

    Example:

    >>> [part.tolist() for part in cut(np.arange(5), 3)]
    [[0, 1], [2, 3], [4]]
    """
    edges = bounds(check_rows(batch), parts)
    batch = map_nest(sliceable, batch)
    shares = list(zip(edges[:-1], edges[1:], strict=True))
    return [rows_of(batch, slice(*share)) for share in shares[own]]


def rows_of(batch: Any, rows: slice) -> Any:
    """Some rows of a batch.

    Raises:
        ValueError: If it has arrays that can't be cut.
    """

    def own(leaf: Any) -> Any:
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

    return map_nest(own, batch)


def empty(element: Any) -> Any:
    """The element without its rows, for a replica that has no data."""
    return map_nest(lambda leaf: leaf[:0] if shape_of(leaf) else leaf, element)


def with_shape(leaf: Any, shape: tuple[int | None, ...]) -> Any:
    """A `keras.KerasTensor` like another one but for its shape."""
    return keras.KerasTensor(
        shape, leaf.dtype, sparse=leaf.sparse, ragged=leaf.ragged
    )


def _joined(step: list[Any]) -> Any:
    """One global batch of the parts of a step."""

    def join(parts: Sequence[Any]) -> Any:
        if parts[0] is None:
            return None
        return np.concatenate([_on_host(part) for part in parts])

    return regroup(step, join, always)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    return keras.ops.convert_to_numpy(leaf)
