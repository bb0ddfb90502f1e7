"""Batches of rows of anything that gives rows by their index."""

from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np


class Rows(keras.utils.PyDataset):
    """Batches for `fit` from a source of rows; each worker loads its own.

    A source is a list, a Hugging Face `Dataset`, a `grain.MapDataset`, a
    map-style dataset of PyTorch, or anything else with `__len__` and
    `__getitem__`. With several workers, each loads the rows of its own
    replicas, and of the first batch all rows, which are compared. In plain
    Keras, it is a `PyDataset` as any other.

    Rows are stacked, so their arrays need equal shapes. Where this is not
    enough, write a `keras.utils.PyDataset` whose `__getitem__` has the
    parameter `own`: see "Many workers" in the guide.

    Args:
        source: Object with `__len__` and `__getitem__`, which takes an
            integer. If it has `__getitems__`, that is called with a list of
            integers and returns a list of rows.
        batch_size: Integer, the rows of a global batch. The last batch of an
            epoch may have fewer.
        shuffle: Boolean, whether each epoch has an order of its own. `fit`
            shuffles batches as well, unless its `shuffle` is false.
        seed: Integer, for the orders. By default they follow from NumPy's
            global state, which `BackupAndRestore` restores; so with
            `keras.utils.set_random_seed`, a restarted `fit` goes on in the
            same order. With a seed of its own, it begins with the first one.
        transform: Callable from a row of the source to what a batch has of it:
            an array, a tuple `(x, y)` or `(x, y, sample_weight)`, or a dict.
        threads: Integer, how many threads load the rows of a batch. With more
            than one, random numbers from global states depend on which
            thread comes first.

    Raises:
        TypeError: If `source` has no length or takes no index.
        ValueError: If `source` is empty, or a number is not positive.

    Example:

    >>> numbers = [{"value": i, "label": i % 2} for i in range(7)]
    >>> rows = keras_dist.Rows(
    ...     numbers, batch_size=4, transform=lambda r: (r["value"], r["label"])
    ... )
    >>> x, y = rows[1]
    >>> x.tolist(), y.tolist()
    ([4, 5, 6], [0, 1, 0])
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__()
        for name in ("__len__", "__getitem__"):
            if not hasattr(type(source), name):
                raise TypeError(
                    "A source of rows needs `__len__` and `__getitem__`. "
                    f"Received: a {type(source).__name__}, without `{name}`. "
                    "Expected: a list, a map-style dataset, or the like. Data "
                    "that can only be read in order goes to `fit` as it is."
                )
        if not len(source):
            raise ValueError(
                "A source of rows must not be empty. Received: a "
                f"{type(source).__name__} of length 0."
            )
        for name, number in (("batch_size", batch_size), ("threads", threads)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(
                    f"`{name}` must be a positive integer. Received: "
                    f"{name}={number!r}."
                )
        self._source = source
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._rng = None if seed is None else np.random.default_rng(seed)
        self._transform = transform
        self._threads = threads
        self._order: Any = np.arange(len(source))

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch."""
        return -(-len(self._source) // self._batch_size)

    def on_epoch_begin(self) -> None:
        """Draws the order of an epoch; `fit` calls it."""
        if self._shuffle:
            draw = np.random if self._rng is None else self._rng
            self._order = draw.permutation(len(self._source))

    def __getitem__(
        self, index: int, own: Callable[[Any], Any] = lambda rows: rows
    ) -> Any:
        """Returns a batch.

        Args:
            index: Integer, its place in the epoch.
            own: Callable from the indices of the batch's rows to those that
                are to be loaded.

        Returns:
            Nest of arrays, as `transform` returns it, with an axis for rows.
        """
        start = index * self._batch_size
        indices = own(self._order[start : start + self._batch_size])
        rows = self._load(indices.tolist())
        return keras.tree.map_structure(_stacked, *rows)

    def _load(self, indices: Sequence[int]) -> list[Any]:
        load_all = getattr(self._source, "__getitems__", None)
        if self._threads == 1:
            if load_all is not None:
                return list(map(self._transformed, load_all(list(indices))))
            return list(map(self._row, indices))
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._row, indices))

    def _row(self, index: int) -> Any:
        return self._transformed(self._source[index])

    def _transformed(self, row: Any) -> Any:
        return row if self._transform is None else self._transform(row)


def _stacked(*leaves: Any) -> np.ndarray:
    arrays = [np.asarray(leaf) for leaf in leaves]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ValueError(
            "Rows of a batch must have equal shapes. Received: "
            f"{' and '.join(map(str, shapes))}. Pad or cut them in "
            "`transform`."
        )
    return np.stack(arrays)
