"""Each kind of data gives its rows in order, and again in the next pass."""

import gc
import threading

import keras
import numpy as np
import pytest

from conformance.contract import contract
from inputs.helpers import distributed
from inputs.helpers import installed
from inputs.helpers import joined
from inputs.helpers import lists
from keras_dist.inputs.sources.numpy_data import numpy_dataset
from parity import kinds
from parity.kinds import Batches
from parity.kinds import slices

ROWS, BATCH_SIZE = 11, 4
COLUMNS = (
    np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3),
    np.arange(ROWS, dtype="int32"),
)


def from_list():
    return slices(COLUMNS, BATCH_SIZE)


def from_function():
    return lambda: iter(from_list())


def from_numpy():
    return numpy_dataset(COLUMNS).batch(BATCH_SIZE)


def from_py_dataset(**options):
    return Batches(from_list(), **options)


def from_py_dataset_workers():
    return from_py_dataset(workers=2, max_queue_size=2)


def from_tensors():
    return keras.tree.map_structure(keras.ops.convert_to_tensor, from_list())


def from_tf_data():
    return kinds.tf_rows(COLUMNS).batch(BATCH_SIZE)


def from_torch_loader():
    return kinds.torch_loader(COLUMNS, batch_size=BATCH_SIZE)


def from_grain_map():
    return kinds.grain_rows(COLUMNS).batch(BATCH_SIZE)


def from_grain_iter():
    return kinds.grain_rows(COLUMNS).to_iter_dataset().batch(BATCH_SIZE)


def from_grain_loader():
    import grain

    rows = list(zip(*COLUMNS, strict=True))
    return grain.DataLoader(
        data_source=rows,
        sampler=grain.samplers.SequentialSampler(
            num_records=ROWS, shard_options=grain.sharding.NoSharding()
        ),
        operations=[grain.transforms.Batch(BATCH_SIZE)],
    )


def kind(make, cardinality, module=None):
    marks = [installed(module)] if module else []
    name = make.__name__.removeprefix("from_")
    return pytest.param(make, cardinality, id=name, marks=marks)


KINDS = [
    kind(from_list, 3),
    kind(from_function, -2),
    kind(from_numpy, 3),
    kind(from_py_dataset, 3),
    kind(from_py_dataset_workers, 3),
    kind(from_tensors, 3),
    kind(from_tf_data, 3, "tensorflow"),
    kind(from_torch_loader, 3, "torch"),
    kind(from_grain_map, 3, "grain"),
    kind(from_grain_iter, -2, "grain"),
    kind(from_grain_loader, -2, "grain"),
]


@contract(175, native=False)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("make", "cardinality"), KINDS)
def test_kind(make, cardinality, num_replicas):
    data = distributed(make(), num_replicas)
    expected = slices(COLUMNS, BATCH_SIZE)
    assert data.cardinality == cardinality
    for _ in range(2):
        batches = list(data)
        assert len(batches) == len(expected)
        for (x, y), (own_x, own_y) in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(joined(x), own_x)
            np.testing.assert_array_equal(joined(y), own_y)
    x_spec, y_spec = data.element_spec
    if num_replicas > 1:
        assert len(x_spec.values) == num_replicas
        x_spec, y_spec = x_spec.values[-1], y_spec.values[-1]
    assert (x_spec.shape, x_spec.dtype) == ((None, 3), "float32")
    assert (y_spec.shape, y_spec.dtype) == ((None,), "int32")


def test_the_spec_is_read_from_a_batch_that_is_delivered():
    read = []

    def batches():
        for index in range(3):
            read.append(index)
            yield np.full((2,), index)

    data = distributed(batches(), 2)
    assert data.element_spec.values[0].shape == (None,)
    assert read == [0]
    iterator = iter(data)
    assert iterator.element_spec.values[1].shape == (None,)
    assert [lists(batch) for batch in iterator] == [
        [[0], [0]],
        [[1], [1]],
        [[2], [2]],
    ]
    assert read == [0, 1, 2]


def test_the_spec_of_no_data():
    with pytest.raises(ValueError, match="an empty IterableSource"):
        _ = distributed([], 2).element_spec
    assert list(distributed([], 2)) == []


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_generator_is_read_once(num_replicas):
    data = distributed((np.full((2,), i) for i in range(4)), num_replicas)
    first = next(iter(data))
    assert joined(first).tolist() == [0, 0]
    # Another loop goes on, with what was read ahead.
    assert [joined(batch)[0] for batch in data] == [1, 2, 3]
    with pytest.raises(ValueError, match="(?s)was read to its end.*Expected"):
        iter(data)


def test_a_generator_stays_its_owners():
    def batches():
        for index in range(4):
            yield np.full((2,), index)

    mine = batches()
    data = distributed(mine, 2)
    next(iter(data))
    del data
    gc.collect()
    assert next(mine).tolist() == [2, 2]


def test_a_generator_may_reuse_its_memory():
    """What is read ahead does not change what was read before."""

    def batches():
        buffer = np.zeros((4,), "float32")
        for index in range(4):
            buffer[:] = index
            yield buffer

    for num_replicas in (1, 2):
        read = [joined(b).tolist() for b in distributed(batches, num_replicas)]
        assert read == [[float(i)] * 4 for i in range(4)]


def test_the_users_arrays_are_not_shared():
    column = np.arange(4.0, dtype="float32")
    (batch,) = distributed([column], 2)
    column[:] = 0
    assert lists(batch) == [[0.0, 1.0], [2.0, 3.0]]


def test_a_py_dataset_is_told_of_its_epochs():
    dataset = from_py_dataset()
    data = distributed(dataset, 2)
    for _ in data:
        pass
    assert dataset.epochs == 1


def test_a_py_dataset_without_end():
    class Endless(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, index):
            return np.full((2,), index)

    data = distributed(Endless(), 2)
    assert data.cardinality == -1
    iterator = iter(data)
    assert [joined(next(iterator))[0] for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_end_with_the_pass(workers):
    before = set(threading.enumerate())
    data = distributed(
        Batches([np.zeros((2,))] * 50, workers=workers, max_queue_size=2), 2
    )
    iterator = iter(data)
    next(iterator)
    del iterator
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        # The last ones have been told to end, and nobody waits for them.
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_grain_repeated_for_ever():
    pytest.importorskip("grain")
    rows = kinds.grain_rows(COLUMNS)
    assert distributed(rows.repeat().batch(2), 2).cardinality == -1
