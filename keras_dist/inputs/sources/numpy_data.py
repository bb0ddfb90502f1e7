"""NumpyDataset: the rows of NumPy arrays, one by one or in batches."""

import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.rows import readable
from keras_dist.core.rows import shape_of
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import dtype_name
from keras_dist.internals import keras_data


class NumpyDataset:
    """A dataset of the rows of arrays, one by one or in batches.

    `strategy.experimental_make_numpy_dataset` creates it. It can be read any
    number of times. Where TensorFlow is installed, it has the other methods of
    a `tf.data.Dataset`, such as `shuffle`, which return one.

    Args:
        columns: Nest of NumPy arrays with one number of rows.
        repeats: Integer, number of times that the rows are read, or `None` for
            ever.
        batch_size: Integer, or `None` for single rows.
        drop_remainder: Boolean, true to leave out an incomplete last batch.

    Example:

    >>> dataset = numpy_dataset(np.arange(5))
    >>> [batch.tolist() for batch in dataset.batch(2)]
    [[0, 1], [2, 3], [4]]
    >>> int(dataset.reduce(0, lambda total, row: total + row))
    10
    """

    def __init__(
        self,
        columns: object,
        repeats: int | None = 1,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        self.columns = columns
        self.repeats = repeats
        self.batch_size = batch_size
        self.drop_remainder = drop_remainder
        self._rows = len(leaves_of(columns)[0])

    def batch(
        self, batch_size: int, drop_remainder: bool = False
    ) -> "NumpyDataset":
        """Groups consecutive rows to batches.

        Args:
            batch_size: Integer, at least 1; for a distributed dataset the
                global batch size.
            drop_remainder: Boolean, true to leave out an incomplete last
                batch.

        Returns:
            A `NumpyDataset` of batches.

        Raises:
            ValueError: If the size is not positive, or rows are in batches
                already.
        """
        if self.batch_size is not None:
            raise ValueError(
                f"The dataset is in batches of {self.batch_size} already. "
                f"Received: batch_size={batch_size}."
            )
        if batch_size < 1:
            raise ValueError(
                "`batch_size` must be at least 1. Received: "
                f"batch_size={batch_size}."
            )
        return NumpyDataset(
            self.columns, self.repeats, batch_size, drop_remainder
        )

    def repeat(self, count: int | None = None) -> "NumpyDataset":
        """Repeats the rows; has to be called before `batch`.

        Args:
            count: Integer, number of repetitions; `None` or -1 for ever.

        Returns:
            A `NumpyDataset` of rows.

        Raises:
            ValueError: If rows are in batches already, or if `count` is below
                -1.
        """
        if count is not None and count < -1:
            raise ValueError(
                f"`count` must be at least 0, or -1 or None to repeat for "
                f"ever. Received: {count!r}."
            )
        if self.batch_size is not None:
            raise ValueError(
                "`repeat` must come before `batch`. Otherwise the last batch "
                "of each pass stays incomplete. Received: a dataset in "
                f"batches of {self.batch_size}."
            )
        if count in (None, -1) or self.repeats is None:
            return NumpyDataset(self.columns, None)
        return NumpyDataset(self.columns, self.repeats * count)

    def reduce(
        self, initial_state: object, reduce_func: Callable[[Any, Any], Any]
    ) -> Any:
        """Combines all elements.

        Args:
            initial_state: Any object, the state before the first element.
            reduce_func: Callable from a state and an element to a state.

        Returns:
            The last state.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def __getattr__(self, name: str) -> Any:
        # The other methods of `tf.data`, such as `shuffle` and `map`.
        if name.startswith("_"):
            raise AttributeError(name)
        make = keras_data.tf_dataset_of_rows()
        if make is None:
            raise AttributeError(
                "A dataset of NumPy arrays has the methods `batch`, `repeat` "
                f"and `reduce`.\nReceived: `{name}`. If TensorFlow is "
                "installed, it also has the methods of a `tf.data.Dataset`: "
                "`pip install tensorflow`. Or change the arrays before, for "
                "instance with `numpy.random.permutation`."
            )
        dataset = make(self.columns)
        if self.repeats != 1:
            dataset = dataset.repeat(self.repeats)
        if self.batch_size is not None:
            dataset = dataset.batch(self.batch_size, self.drop_remainder)
        return getattr(dataset, name)

    @property
    def cardinality(self) -> int:
        """Number of elements; -1 if there is no end."""
        total, size = self._total, self.batch_size or 1
        if total is None:
            return INFINITE
        return total // size if self.drop_remainder else -(-total // size)

    @property
    def element_spec(self) -> Any:
        """Nest like an element, of `keras.KerasTensor`s."""
        rows: tuple[int | None, ...] = ()
        if self.batch_size is not None:
            is_static = self.drop_remainder or self._total is None
            rows = (self.batch_size if is_static else None,)
        return map_nest(
            lambda column: keras.KerasTensor(
                (*rows, *column.shape[1:]), dtype_name(column.dtype)
            ),
            self.columns,
        )

    @property
    def _total(self) -> int | None:
        return None if self.repeats is None else self.repeats * self._rows

    def __iter__(self) -> Iterator[Any]:
        if not self._rows:
            return
        for index in itertools.count():
            if self.cardinality != INFINITE and index >= self.cardinality:
                return
            yield self._element(index)

    def _element(self, index: int) -> Any:
        if self.batch_size is None:
            row = index % self._rows
            return map_nest(lambda column: column[row], self.columns)
        start, stop = index * self.batch_size, (index + 1) * self.batch_size
        if self._total is not None:
            stop = min(stop, self._total)
        if start // self._rows == (stop - 1) // self._rows:
            first = start % self._rows
            rows: Any = slice(first, first + stop - start)
        else:
            rows = np.arange(start, stop) % self._rows
        return map_nest(lambda column: column[rows], self.columns)


def numpy_dataset(numpy_input: object) -> NumpyDataset:
    """Creates a `NumpyDataset` of copies of arrays; a list is stacked."""
    columns = _columns(numpy_input)
    shapes = [shape_of(column) for column in leaves_of(columns)]
    if not shapes or () in shapes or len({s[0] for s in shapes}) > 1:
        raise ValueError(
            "`numpy_input` must be arrays with the same number of rows along "
            f"axis 0. Received: arrays of shapes {shapes}."
        )
    return NumpyDataset(columns)


def _columns(nest: object) -> Any:
    if isinstance(nest, Mapping):
        return {key: _columns(nest[key]) for key in nest}
    if isinstance(nest, tuple):
        columns = [_columns(item) for item in nest]
        return type(nest)(*columns) if hasattr(nest, "_fields") else (*columns,)
    # A copy, so that later changes of the user's array have no effect.
    return np.array(readable(nest))
