"""The examples of the reference pages that read data, for any backend.

A comment over each test names the page and the member it is shown at.
"""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.helpers import compiled
from conformance.helpers import to_numpy
from conformance.pages import DEVICES
from conformance.pages import Range
from conformance.pages import framed
from conformance.pages import ones_for_ever
from conformance.pages import shown


@pytest.fixture
def strategy():
    return keras_dist.MirroredStrategy(DEVICES)


# Strategy: a custom training loop.
def test_a_custom_loop_over_a_distributed_dataset(strategy):
    dataset = Range(8, 4)
    with strategy.scope():
        scale = keras.Variable(2.0)

        def distribute_train_epoch(dataset):
            def replica_fn(rows):
                return keras.ops.sum(keras.ops.cast(rows, "float32")) * scale

            total_result = 0
            for x in dataset:
                per_replica_result = strategy.run(replica_fn, args=(x,))
                total_result += strategy.reduce(
                    keras_dist.ReduceOp.SUM, per_replica_result, axis=None
                )
            return total_result

        dist_dataset = strategy.experimental_distribute_dataset(dataset)
        epochs = [distribute_train_epoch(dist_dataset) for _ in range(2)]
    assert [to_numpy(total).tolist() for total in epochs] == [56.0, 56.0]


# Strategy: experimental_distribute_dataset, over files.
def test_a_dataset_of_files(strategy, tmp_path):
    paths = [tmp_path / f"{i}.npy" for i in range(1, 5)]
    for i, path in enumerate(paths):
        np.save(path, np.arange(2 * i, 2 * i + 2, dtype="float32"))

    class Files:
        def __iter__(self):
            return (np.load(path) for path in paths)

    dist_dataset = strategy.experimental_distribute_dataset(Files())
    results = [
        shown(strategy.run(lambda rows: rows * 2, args=(x,)))
        for x in dist_dataset
    ]
    assert results == [
        [[0.0], [2.0]],
        [[4.0], [6.0]],
        [[8.0], [10.0]],
        [[12.0], [14.0]],
    ]


# Strategy: experimental_distribute_dataset, with element_spec.
def test_the_spec_of_elements(strategy):
    dist_dataset = strategy.experimental_distribute_dataset(Range(4, 2))
    spec = dist_dataset.element_spec
    assert isinstance(spec, keras_dist.PerReplica)
    assert [(s.shape, s.dtype) for s in spec.values] == [((None,), "int32")] * 2
    for x in dist_dataset:
        for part, of_part in zip(x.values, spec.values, strict=True):
            assert keras.backend.standardize_dtype(part.dtype) == of_part.dtype
            assert len(part.shape) == len(of_part.shape)


# OneDeviceStrategy and CentralStorageStrategy (compat.v1):
# experimental_distribute_dataset.
def test_a_loop_that_prints_its_results():
    global_batch_size = 2
    strategy = keras_dist.MirroredStrategy(devices=DEVICES)
    dataset = Range(4, global_batch_size)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    @compiled
    def replica_fn(rows):
        return rows * 2

    result = []
    for x in dist_dataset:
        result.append(strategy.run(replica_fn, args=(x,)))
    assert [shown(x) for x in result] == [[[0], [2]], [[4], [6]]]
    frames = [framed("PerReplica", x.values) for x in result]
    assert repr(result) == f"[{', '.join(frames)}]"


# CentralStorageStrategy: the class, and experimental_distribute_dataset.
def test_parts_of_a_range(strategy):
    dist_dataset = strategy.experimental_distribute_dataset(Range(5, 2))
    parts = [shown(x) for x in dist_dataset]
    assert parts == [[[0], [1]], [[2], [3]], [[4], []]]
    with strategy.scope():

        def train_step(val):
            return val + 1

        results = [
            shown(strategy.run(train_step, args=(x,))) for x in dist_dataset
        ]
    assert results == [[[1], [2]], [[3], [4]], [[5], []]]


# Strategy: experimental_distribute_datasets_from_function. Central storage:
# the same. All v2 pages: distribute_datasets_from_function.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "method",
    [
        "distribute_datasets_from_function",
        "experimental_distribute_datasets_from_function",
    ],
)
def test_datasets_from_a_function(strategy, method):
    contexts = []

    def dataset_fn(input_context):
        contexts.append(input_context)
        return ones_for_ever(input_context, global_batch_size=8)

    ds = getattr(strategy, method)(dataset_fn)
    results = [
        strategy.run(lambda inputs: inputs, args=(batch,))
        for _, batch in zip(range(3), ds, strict=False)
    ]
    assert [shown(x) for x in results] == [[[[[1.0]]] * 4] * 2] * 3
    for context in contexts:
        assert context.num_replicas_in_sync == 2
        assert context.num_input_pipelines == 1
        assert context.input_pipeline_id == 0


# Strategy: experimental_make_numpy_dataset. Central storage: the same.
def test_a_dataset_of_an_array(strategy):
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    assert sum(float(row) for row in dataset) == 10.0
    dataset = dataset.batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    assert [shown(x) for x in dist_dataset] == [[[1.0], [1.0]]] * 5
