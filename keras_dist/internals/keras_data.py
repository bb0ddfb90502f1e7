"""A door to Keras' private names: the data of `fit`, and its epochs.

| name | why |
|---|---|
| `keras.Model._initial_epoch` | where `fit` goes on after a restart |
| `keras.src.trainers.epoch_iterator` | shows the first batch of data |
| `keras.src.trainers.data_adapters` | tells data apart, feeds `fit` batches |
| `_epoch` of these, from Keras 3.16 | shuffles data in `fit` |
| `keras.src.utils.module_utils` | `tf.data`, where TensorFlow is installed |
"""

import inspect
import itertools
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.private_names import private

DataAdapter: type[Any] = private(
    "keras.src.trainers.data_adapters.data_adapter.DataAdapter"
)
GeneratorDataAdapter: type[Any] = private(
    "keras.src.trainers.data_adapters.GeneratorDataAdapter"
)
ArrayDataAdapter: type[Any] = private(
    "keras.src.trainers.data_adapters.ArrayDataAdapter"
)
PyDatasetAdapter: type[Any] = private(
    "keras.src.trainers.data_adapters.PyDatasetAdapter"
)
TFDatasetAdapter: type[Any] = private(
    "keras.src.trainers.data_adapters.TFDatasetAdapter"
)
TorchDataLoaderAdapter: type[Any] = private(
    "keras.src.trainers.data_adapters.TorchDataLoaderAdapter"
)
convert_to_sliceable: Callable[..., Any] = private(
    "keras.src.trainers.data_adapters.array_slicing.convert_to_sliceable"
)
can_convert_arrays: Callable[[Any], bool] = private(
    "keras.src.trainers.data_adapters.array_data_adapter.can_convert_arrays"
)
_adapter_utils = private("keras.src.trainers.data_adapters.data_adapter_utils")
OrderedEnqueuer = private(
    "keras.src.trainers.data_adapters.py_dataset_adapter.OrderedEnqueuer"
)
EpochIterator = private("keras.src.trainers.epoch_iterator.EpochIterator")
_module_utils = private("keras.src.utils.module_utils")
is_tf_dataset = private("keras.src.trainers.data_adapters.is_tf_dataset")
is_torch_dataloader = private(
    "keras.src.trainers.data_adapters.is_torch_dataloader"
)
is_grain_dataset = private("keras.src.trainers.data_adapters.is_grain_dataset")
# From Keras 3.16, JAX' trainer compiles the step that its loop runs, and reads
# the batches of an execution as one.
_make_function = getattr(Trainer, "_make_function", None)
JOINS_STEPS = (
    _make_function is not None
    and "out_shardings" in inspect.signature(_make_function).parameters
)


def are_dense(data: object) -> bool:
    """Returns whether none of the arrays in data is sparse or ragged."""
    tests = (
        _adapter_utils.is_scipy_sparse,
        _adapter_utils.is_jax_sparse,
        _adapter_utils.is_tensorflow_sparse,
        _adapter_utils.is_tensorflow_ragged,
        lambda leaf: getattr(leaf, "is_sparse", False),  # torch
    )
    leaves = keras.tree.flatten(data)
    return not any(test(leaf) for leaf in leaves for test in tests)


def trainer_of_iterator() -> Any:
    """Returns the model whose method is about to make an `EpochIterator`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _READERS:
            trainer = frame.f_locals.get("self")
            if isinstance(trainer, Trainer):
                return trainer
        frame = frame.f_back  # type: ignore[assignment]
    return None


# The methods of a trainer that make iterators.
_READERS = ("fit", "evaluate", "predict")


def tensorflow() -> Any:
    """Returns the module `tensorflow`, which is imported when it is used."""
    return _module_utils.tensorflow


def tf_dataset_of_rows() -> Callable[[Any], Any] | None:
    """Returns `tf.data.Dataset.from_tensor_slices`, or `None` without it."""
    if not tensorflow().available:
        return None
    make: Callable[[Any], Any] = tensorflow().data.Dataset.from_tensor_slices
    return make


class Batches(GeneratorDataAdapter):
    """Data in batches of any structure that a step accepts."""

    def __init__(self, batches: Sequence[Any]) -> None:
        # The base's `__init__` requires tuples.
        self.generator = lambda: iter(batches)
        self._first_batches = batches[:2]
        self._output_signature = None
        self._num_batches = len(batches)

    @property
    def num_batches(self) -> int:
        return self._num_batches


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes `fit` begin with this epoch, from 0; with `None`, its argument."""
    model._initial_epoch = epoch


def shuffling_epoch(iterator: Any) -> int | None:
    """Returns the number by which a trainer's data is shuffled next.

    `None` before Keras 3.16, which shuffles by the global random states.
    """
    epoch: int | None = getattr(iterator.data_adapter, "_epoch", None)
    return epoch


def set_shuffling_epoch(iterator: Any, epoch: int) -> None:
    """Sets what `shuffling_epoch` returns, where there is such a number."""
    if hasattr(iterator.data_adapter, "_epoch"):
        iterator.data_adapter._epoch = epoch


def read_execution(iterator: Iterator[Any], count: int) -> Any:
    """Reads the batches of one execution of `count` steps; returns the last.

    The last execution of an epoch may have fewer batches.
    """
    batch = next(iterator)
    if count == 1:
        return batch
    if not JOINS_STEPS:
        for _ in range(count - 1):
            batch = next(iterator, batch)
        return batch
    if isinstance(batch, list):  # batches that it can't stack
        return batch[-1]
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else leaf[-1], batch
    )


def read_with_workers(dataset: keras.utils.PyDataset) -> Iterator[Any]:
    """Yields a `PyDataset`'s batches in order, read by its own workers."""
    enqueuer = OrderedEnqueuer(
        dataset,
        workers=dataset.workers,
        use_multiprocessing=dataset.use_multiprocessing,
        max_queue_size=dataset.max_queue_size,
    )
    # From Keras 3.16, it asks for the number of the epoch.
    asked = inspect.signature(enqueuer.start).parameters
    enqueuer.start(*([0] if asked else []))
    try:
        yield from itertools.islice(enqueuer.get(), dataset.num_batches)
    finally:
        enqueuer.stop()
