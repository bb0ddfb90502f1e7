"""Keras' adapters of data, of which a worker loads its own rows.

An adapter gives global batches: their arrays have the shape of all rows, and
hold those of this worker's replicas.
"""

import contextlib
import inspect
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist.inputs.own_rows import tf_data
from keras_dist.inputs.own_rows.randomness import OwnRandomness
from keras_dist.inputs.own_rows.shares import MakeLeaf
from keras_dist.inputs.own_rows.shares import OwnTaker
from keras_dist.inputs.own_rows.shares import RowOrder
from keras_dist.inputs.own_rows.shares import Shares
from keras_dist.inputs.own_rows.shares import Taken
from keras_dist.inputs.own_rows.shares import code_of
from keras_dist.inputs.sources.source import RepeatableBatches
from keras_dist.internals import keras_data

# The parameter of `PyDataset.__getitem__` that takes a worker's own rows.
PARAMETER = "own"


def why_all(x: Any) -> str:
    """Returns why a worker has to read all rows of data; "" if it does not."""
    if keras_data.is_torch_dataloader(x):
        from keras_dist.inputs.own_rows import loaders

        return loaders.why_all(x)
    if isinstance(x, keras.utils.PyDataset):
        if PARAMETER in inspect.signature(type(x).__getitem__).parameters:
            return ""
        return f"`__getitem__` of {type(x).__name__} has no `{PARAMETER}`"
    if tf_data.is_own(x):
        return ""
    if isinstance(x, OwnSteps):
        return ""
    if isinstance(x, keras_data.DataAdapter):
        return "not all steps of a distributed dataset have as many rows"
    if keras_data.is_tf_dataset(x) or not keras_data.can_convert_arrays(x):
        return f"a {type(x).__name__} gives whole batches only"
    return "" if keras_data.are_dense(x) else "an array is sparse or ragged"


def own_rows_of(
    adapter: Any, shares: Shares, make_leaf: MakeLeaf, compares: bool
) -> Any:
    """Returns an adapter that loads own rows; `None` if there is none.

    Args:
        adapter: Keras' adapter of a trainer's data.
        shares: The `Shares` of this worker.
        make_leaf: What the backend gives for `own_rows_of` a model.
        compares: Boolean, whether the first batch is compared with that of
            other workers, and so loaded whole.
    """
    if type(adapter) is keras_data.ArrayDataAdapter:
        if not keras_data.are_dense(adapter._inputs):
            return None
        return OwnArrays(adapter, shares, make_leaf)
    if type(adapter) is keras_data.PyDatasetAdapter:
        if not why_all(adapter.py_dataset):
            return OwnPyDatasetAdapter(adapter, shares, make_leaf, compares)
    elif type(adapter) is keras_data.TorchDataLoaderAdapter:
        loader = adapter._dataloader
        if not why_all(loader):
            return OwnLoaderAdapter(loader, shares, make_leaf, compares)
    elif isinstance(adapter, OwnSteps):
        return adapter.for_model(make_leaf)
    elif has_own_rows(adapter):
        return OwnTFDatasetAdapter(adapter, make_leaf)
    return None


def has_own_rows(adapter: Any) -> bool:
    """Returns whether data has own rows only, by `strategy.own_rows`."""
    is_tf_data = type(adapter) is keras_data.TFDatasetAdapter
    return is_tf_data and tf_data.is_own(adapter._dataset)


class _OwnRows:
    """A part of adapters whose batches come in pairs with what was taken."""

    make_leaf: MakeLeaf
    order: RowOrder
    # Batches to show to the comparison of first batches, if the first one of
    # a pass can't be.
    probe: Callable[[], Any] | None = None

    def leaves(self, pair: tuple[Any, Any]) -> Any:
        """Gives a batch the form of a global one."""
        batch, numbers = pair
        return Taken.read(numbers).leaves(batch, self.make_leaf)

    def _with_leaves(self, dataset: Any) -> Any:
        """The same of a `tf.data.Dataset` of pairs."""
        tf = keras_data.tensorflow()

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def leaves(batch: Any, numbers: Any) -> Any:
            first, _, total, code = (numbers[place] for place in range(4))

            def leaf_of(rows: Any) -> Any:
                return self.make_leaf(rows, first, total, code)

            return keras.tree.map_structure(leaf_of, batch)

        return dataset.map(leaves)

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()  # type: ignore[misc]
        self.order.begin()

    def on_epoch_end(self) -> None:
        super().on_epoch_end()  # type: ignore[misc]
        self.order.end()


class _Again:
    """An iterable that begins a pass each time."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


class _OwnPairs(_OwnRows):
    """A part of adapters of which Keras reads such pairs."""

    def get_jax_iterator(self) -> Iterator[Any]:
        return map(self.leaves, super().get_jax_iterator())  # type: ignore[misc]

    def get_torch_dataloader(self) -> Any:
        begin = super().get_torch_dataloader  # type: ignore[misc]
        return _Again(lambda: map(self.leaves, begin()))


class OwnArrays(_OwnRows, keras_data.ArrayDataAdapter):
    """Arrays, whose indices are drawn as Keras does it."""

    def __init__(
        self, adapter: Any, shares: Shares, make_leaf: MakeLeaf
    ) -> None:
        # Keras has checked the data already.
        self.__dict__.update(vars(adapter))
        self.make_leaf, self._shares = make_leaf, shares
        # TensorFlow draws the order in its own program.
        self.order = RowOrder(self.num_batches, is_ahead=False)

    def _get_iterator(
        self, slice_and_convert_fn: Callable[..., Any], inputs: Any
    ) -> Iterator[Any]:
        drawn: Any = None
        mine: Any = None
        taken: Taken | None = None

        def own_part(sliceable: Any, indices: Any) -> Any:
            nonlocal drawn, mine, taken
            if indices is not drawn:  # of another batch, not another array
                drawn = indices
                mine, taken = self._own(indices)
            return slice_and_convert_fn(sliceable, indices=mine)

        for batch in super()._get_iterator(own_part, inputs):
            assert taken is not None
            self.order.note(taken.code)
            yield taken.leaves(batch, self.make_leaf)

    def _own(self, indices: Any) -> tuple[Any, Taken]:
        """Returns the own part of a batch's indices, an array or a slice."""
        is_slice = isinstance(indices, slice)
        ids = range(indices.start, indices.stop) if is_slice else indices
        own = self._shares.of(len(ids))
        mine = ids[own.start : own.stop]
        if is_slice:
            mine = slice(mine.start, mine.stop)
        return mine, Taken.of(own, len(ids), code_of(ids))

    def get_torch_dataloader(self) -> Any:
        loader = super().get_torch_dataloader()

        def own_batch(indices: Any) -> Any:
            mine, taken = self._own(indices)
            self.order.note(taken.code)
            rows = loader.dataset.__getitems__(mine)
            return taken.leaves(rows, self.make_leaf)

        def begin() -> Iterator[Any]:
            # It draws what a loader draws at the start of a pass. To read from
            # it would take a tenth of a small step.
            iter(loader)
            return map(own_batch, loader.batch_sampler)

        return _Again(begin)

    def get_tf_dataset(self) -> Any:
        tf = keras_data.tensorflow()
        # With the same draws as Keras' own pipeline, in the same program.
        drawn = keras_data.ArrayDataAdapter(
            np.arange(self._num_samples),
            batch_size=self._batch_size,
            shuffle=self._shuffle,
        )
        arrays = keras_data.convert_to_sliceable(
            self._inputs, target_backend="tensorflow"
        )
        arrays = tf.data.Dataset.from_tensors(
            keras.tree.lists_to_tuples(arrays)
        )
        # All batches have the full size but for the last one.
        full = min(self._batch_size, self._num_samples)
        of_full = self._shares.of(full)
        of_last = self._shares.of(self._partial_batch_size or full)

        def own_part(indices: Any, arrays: Any) -> Any:
            total = tf.shape(indices)[0]
            first = tf.where(total == full, of_full.start, of_last.start)
            stop = tf.where(total == full, of_full.stop, of_last.stop)

            def leaf_of(array: Any) -> Any:
                if array is None:
                    return None
                rows = tf.gather(array, indices[first:stop])
                return self.make_leaf(rows, first, total, 0)

            return keras.tree.map_structure(leaf_of, arrays)

        pairs = tf.data.Dataset.zip((drawn.get_tf_dataset(), arrays.repeat()))
        own = pairs.map(
            # Converting it would take longer than tracing it.
            tf.autograph.experimental.do_not_convert(own_part),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return own.prefetch(tf.data.AUTOTUNE)


class OwnPyDataset(keras.utils.PyDataset):
    """A `PyDataset` of pairs: batches of own rows, and what was taken."""

    def __init__(self, inner: Any, shares: Shares) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner, self._shares = inner, shares
        # Several threads or processes have no first batch, and no states that
        # are theirs alone.
        self.is_alone = inner.workers < 2 and not inner.use_multiprocessing
        self._randomness = OwnRandomness(shares.first_replica)
        # Whether the next batch is taken whole.
        self.is_whole = False

    @property
    def num_batches(self) -> Any:
        return self._inner.num_batches

    def __getitem__(self, index: int) -> Any:
        is_whole, self.is_whole = self.is_whole, False
        with contextlib.ExitStack() as stack:
            if is_whole:
                stack.enter_context(self._randomness.alike())

            def part() -> None:
                # What chose the rows has drawn alike on all workers.
                if self.is_alone:
                    stack.enter_context(self._randomness.apart())

            own = OwnTaker(None if is_whole else self._shares, part)
            batch = self._inner.__getitem__(index, own=own)
        if own.taken is None:
            raise ValueError(
                f"`__getitem__` of {type(self._inner).__name__} has a "
                f"parameter `{PARAMETER}`, but did not call it. Received: "
                f"index {index}. Expected: `ids = {PARAMETER}(ids)`, where "
                "`ids` has one item for each row of the global batch, before "
                "these rows are loaded."
            )
        return batch, np.array(own.taken.numbers, "int32")

    def whole(self, index: int) -> Any:
        """Returns a batch with all of its rows."""
        return self._inner.__getitem__(index, own=OwnTaker(None))

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()


class OwnPyDatasetAdapter(_OwnPairs, keras_data.PyDatasetAdapter):
    """A `PyDataset` with the parameter `own`."""

    def __init__(
        self, adapter: Any, shares: Shares, make_leaf: MakeLeaf, compares: bool
    ) -> None:
        self._own = OwnPyDataset(adapter.py_dataset, shares)
        super().__init__(self._own, shuffle=adapter.shuffle)
        # As Keras does it, with the weights of classes.
        self._standardize = adapter._standardize_batch
        self.make_leaf, self._compares = make_leaf, compares
        if compares and not self._own.is_alone:
            self.probe = lambda: self._standardize(self._own.whole(0))
        self._arm(is_ahead=False)

    def _arm(self, is_ahead: bool) -> None:
        self._own.is_whole = self._compares and self._own.is_alone
        self.order = RowOrder(self.num_batches, is_ahead)

    def _standardize_batch(self, pair: Any) -> Any:
        batch, numbers = pair
        return self._standardize(batch), numbers

    def _get_iterator(self) -> Iterator[Any]:
        return self.order.noted(super()._get_iterator())

    def get_tf_dataset(self) -> Any:
        # Keras loads two batches to know their shapes.
        self._own.is_whole = False
        dataset = super().get_tf_dataset()
        self._arm(is_ahead=True)
        return self._with_leaves(dataset)


class OwnLoaderAdapter(_OwnRows, keras_data.TorchDataLoaderAdapter):
    """PyTorch's `DataLoader` of a dataset with indices."""

    def __init__(
        self, loader: Any, shares: Shares, make_leaf: MakeLeaf, compares: bool
    ) -> None:
        from keras_dist.inputs.own_rows.loaders import own_loader

        super().__init__(own_loader(loader, shares))
        self.make_leaf, self._compares = make_leaf, compares
        self._arm(is_ahead=False)

    def _arm(self, is_ahead: bool) -> None:
        self._dataloader.batch_sampler.is_whole = self._compares
        self.order = RowOrder(self.num_batches, is_ahead)

    def get_numpy_iterator(self) -> Iterator[Any]:
        # Of pairs, which TensorFlow's pipeline reads.
        return self.order.noted(super().get_numpy_iterator())

    def get_jax_iterator(self) -> Iterator[Any]:
        return map(self.leaves, self.get_numpy_iterator())

    def get_torch_dataloader(self) -> Any:
        return _Again(
            lambda: map(self.leaves, self.order.noted(self._dataloader))
        )

    def get_tf_dataset(self) -> Any:
        # Keras loads two batches to know their shapes.
        self._dataloader.batch_sampler.is_whole = False
        dataset = super().get_tf_dataset()
        self._arm(is_ahead=True)
        return self._with_leaves(dataset)


class OwnTFDatasetAdapter(_OwnRows, keras_data.TFDatasetAdapter):
    """A `tf.data` pipeline that `strategy.own_rows` has made."""

    def __init__(self, adapter: Any, make_leaf: MakeLeaf) -> None:
        super().__init__(adapter._dataset)
        self.make_leaf = make_leaf
        # TensorFlow reads it in its own program.
        self.order = RowOrder(None, is_ahead=False)

    def get_jax_iterator(self) -> Iterator[Any]:
        return self._leaves(super().get_jax_iterator())

    def get_torch_dataloader(self) -> Any:
        begin = super().get_torch_dataloader
        return _Again(lambda: self._leaves(begin()))

    def _leaves(self, elements: Iterable[Any]) -> Iterator[Any]:
        pairs = (element.pair for element in elements)
        return map(self.leaves, self.order.noted(pairs))

    def get_tf_dataset(self) -> Any:
        pairs = super().get_tf_dataset().map(lambda element: element.pair)
        return self._with_leaves(pairs)


class OwnSteps(_OwnPairs, RepeatableBatches):
    """The steps of a distributed dataset, of which a worker has its part.

    Args:
        read: Callable that begins a pass over batches of own rows.
        cardinality: Integer, the steps of a pass, or `INFINITE`.
        taken: `Taken` of each of them.
    """

    def __init__(
        self, read: Callable[[], Iterator[Any]], cardinality: int, taken: Taken
    ) -> None:
        numbers = np.array(taken.numbers, "int32")
        super().__init__(
            lambda: ((batch, numbers) for batch in read()), cardinality
        )
        # Each worker has an order of its own.
        self.order = RowOrder(None, is_ahead=False)

    def for_model(self, make_leaf: MakeLeaf) -> "OwnSteps":
        """Sets what a model's backend gives for `own_rows_of`."""
        self.make_leaf = make_leaf
        return self

    def get_tf_dataset(self) -> Any:
        return self._with_leaves(super().get_tf_dataset())
