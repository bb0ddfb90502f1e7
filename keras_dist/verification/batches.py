"""The batches that both copies of a model get."""

import functools
import itertools
import operator
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_dist.internals import keras_data

# Default rows of each replica in a full batch.
_ROWS = 4


@dataclass(frozen=True)
class Batch:
    """One batch of data."""

    data: Any  # (x, y, sample_weight), or another nest of arrays
    rows: int
    class_weight: Any = None
    is_bare: bool = False  # a step gets `data` unchanged
    # Of each row, the one of the batch that this was made of.
    index: Any = None

    def arguments(self, trains: bool) -> dict[str, Any]:
        """Returns the arguments of `fit` or `evaluate` for this batch."""
        if self.is_bare:
            return {"x": keras_data.Batches([self.data])}
        names = ("x", "y", "sample_weight")
        given = dict(zip(names, self.data, strict=False))
        if trains and self.class_weight is not None:
            given["class_weight"] = self.class_weight
        return {**given, "batch_size": self.rows}

    @property
    def element(self) -> Any:
        """The batch as a dataset has it."""
        if self.is_bare:
            return self.data
        # TensorFlow's datasets have no lists.
        data = keras.tree.lists_to_tuples(self.data)
        return data[0] if len(data) == 1 else data

    def reordered(self) -> "Batch | None":
        return self.with_rows(np.arange(self.rows)[::-1])

    def twice(self) -> "Batch | None":
        return self.with_rows(np.tile(np.arange(self.rows), 2))

    def with_rows(self, index: Any) -> "Batch | None":
        """Returns a batch of some rows; `None` if the data has no rows."""
        leaves = [x for x in keras.tree.flatten(self.data) if x is not None]
        if not all(
            isinstance(leaf, np.ndarray) and leaf.shape[:1] == (self.rows,)
            for leaf in leaves
        ):
            return None
        data = _map(operator.itemgetter(index), self.data)
        return replace(self, data=data, rows=len(index), index=index)


def batches_of(
    x: object,
    y: object,
    sample_weight: object,
    class_weight: object,
    batch_size: int | None,
    steps: int,
    num_replicas: int,
) -> list[Batch]:
    """Returns the batches to compare with, of several sizes, checked."""
    if steps < 1:
        raise ValueError(
            "`steps` must be the number of batches to train. Received: "
            f"{steps}. Expected: an integer of at least 1."
        )
    if not _is_arrays(x, y):
        return _of_dataset(x, class_weight, steps, num_replicas)
    data = _map(_as_numpy, _without_tail((x, y, sample_weight)))
    rows = min(
        leaf.shape[0] for leaf in keras.tree.flatten(data) if leaf is not None
    )
    if not rows:
        raise ValueError(
            "`verify` needs rows to train with. Received: arrays without rows."
        )
    size = min(batch_size or _ROWS * num_replicas, rows)
    batches, begin = [], 0
    for count in _sizes(size, steps, num_replicas):
        # Rows are used again if there are too few.
        index = (begin + np.arange(count)) % rows
        begin += count
        cut = _map(functools.partial(_rows_of, index), data)
        batches.append(Batch(cut, count, class_weight))
    return batches


def _rows_of(index: Any, leaf: Any) -> Any:
    try:
        return leaf[index]
    except (TypeError, ValueError, IndexError) as error:
        raise TypeError(
            "`verify` splits arrays into batches by their rows. Received: "
            f"{type(leaf).__name__}, whose rows can't be selected by index. "
            "Expected: arrays, or data in batches, such as "
            "`tf.data.Dataset.from_tensor_slices((x, y)).batch(8)`."
        ) from error


def _sizes(size: int, steps: int, num_replicas: int) -> list[int]:
    """Returns sizes: full, odd, fewer rows than replicas, then full again."""
    odd = size - 1 if (size - 1) % max(num_replicas, 2) else size - 2
    few = max(min(num_replicas - 1, size), 1)
    sizes = [size, max(odd, 1), few, *[size] * steps]
    is_even = num_replicas > 1 and size % num_replicas == 0
    return sizes[: max(steps, 2) if is_even else steps]


def _of_dataset(
    x: object, class_weight: object, steps: int, num_replicas: int
) -> list[Batch]:
    batches = [
        _batch_of(element, class_weight)
        for element in itertools.islice(_elements(x), steps)
    ]
    if not batches:
        raise ValueError(
            f"`verify` needs data to train with. Received: {x!r}, which has "
            "no batches."
        )
    if all(batch.rows % num_replicas == 0 for batch in batches):
        # The last batch is cut so that it does not divide; a cut copy is added
        # to an only batch.
        cut = batches[-1].with_rows(np.arange(max(batches[-1].rows - 1, 1)))
        if cut is not None:
            batches = (
                [*batches[:-1], cut] if len(batches) > 1 else [*batches, cut]
            )
    return batches


def _elements(x: Any) -> Iterator[Any]:
    if isinstance(x, keras.utils.PyDataset):
        for index in range(len(x)):
            yield x[index]
        return
    if x is not None:
        yield from (x() if callable(x) else x)


def _batch_of(element: object, class_weight: object) -> Batch:
    if isinstance(element, list):
        element = tuple(element)
    data = _map(_as_numpy, element)
    # `fit` takes apart tuples of 2 or 3 items, and nothing else.
    is_bare = not isinstance(data, tuple) or len(data) not in (2, 3)
    rows = [
        int(leaf.shape[0])
        for leaf in keras.tree.flatten(data)
        if getattr(leaf, "shape", ())
    ]
    if not rows:
        raise ValueError(
            "`verify` needs batches whose first axis is the rows. Received: "
            f"{element!r}."
        )
    return Batch(data, rows[0], class_weight, is_bare)


def _is_arrays(x: object, y: object) -> bool:
    if y is not None:
        return True
    leaves: Sequence[Any] = keras.tree.flatten(x)
    if isinstance(x, list) and (not x or isinstance(x[0], (tuple, list, dict))):
        return False  # batches
    return all(hasattr(leaf, "shape") for leaf in leaves)


def _without_tail(data: tuple[Any, ...]) -> tuple[Any, ...]:
    while len(data) > 1 and data[-1] is None:
        data = data[:-1]
    return data


def _as_numpy(leaf: object) -> Any:
    if isinstance(leaf, np.ndarray) or not hasattr(leaf, "__array__"):
        return leaf
    return np.asarray(keras.ops.convert_to_numpy(leaf))


def _map(fn: Callable[[Any], Any], nest: object) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else fn(leaf), nest
    )
