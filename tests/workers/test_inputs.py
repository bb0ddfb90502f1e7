"""Distributed input gives each worker its rows, from data of any kind."""

import importlib.util

import keras
import numpy as np
import pytest

import keras_dist
from workers.clusters import on_workers

ROWS = 11
HAS_TF = importlib.util.find_spec("tensorflow") is not None

pytestmark = pytest.mark.runs_on("jax", "tensorflow", "torch")
needs_tf = pytest.mark.skipif(
    not HAS_TF, reason="The data is of tensorflow, which is not installed."
)


def _made():
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    return strategy, strategy.plan.cluster.index


def _rows():
    return np.arange(ROWS, dtype="float32")


def _batches(size=4):
    return [_rows()[start : start + size] for start in range(0, ROWS, size)]


class _Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(_batches())

    def __getitem__(self, index):
        return _batches()[index]


def _kinds():
    """The same batches, as data of many kinds."""
    kinds = {
        "list": _batches(),
        "generator": (batch for batch in _batches()),
        "function": lambda: iter(_batches()),
        "py_dataset": _Batches(),
        "numpy": keras_dist.get_strategy()
        .experimental_make_numpy_dataset(_rows())
        .batch(4),
    }
    if HAS_TF:
        import tensorflow as tf

        kinds["tf_data"] = tf.data.Dataset.from_tensor_slices(_rows()).batch(4)
    if keras.backend.backend() == "torch":
        from torch.utils.data import DataLoader

        kinds["torch_loader"] = DataLoader(_rows(), batch_size=4)
    if importlib.util.find_spec("grain"):
        import grain

        kinds["grain"] = grain.MapDataset.source(_rows()).batch(4)
    return kinds


def _read(data):
    """For each step, the rows of each local replica."""
    return [
        [keras.ops.convert_to_numpy(part).tolist() for part in step.values]
        for step in data
    ]


@on_workers(devices=2)
def test_every_kind_is_cut_alike():
    strategy, index = _made()
    expected = [
        [[[0.0], [1.0]], [[4.0], [5.0]], [[8.0], [9.0]]],
        [[[2.0], [3.0]], [[6.0], [7.0]], [[10.0], []]],
    ][index]
    for name, data in _kinds().items():
        read = _read(strategy.experimental_distribute_dataset(data))
        assert read == expected, name


@on_workers(devices=2)
def test_sums_are_global():
    strategy, _ = _made()
    sums = [
        strategy.reduce("SUM", strategy.run(keras.ops.sum, (batch,)), axis=None)
        for batch in strategy.experimental_distribute_dataset(_batches())
    ]
    assert list(map(float, sums)) == [6.0, 22.0, 27.0]


@on_workers(devices=2)
def test_a_worker_with_less_data_gets_empty_batches():
    strategy, index = _made()

    def amounts(context):
        """Worker 0 has two batches, worker 1 has five."""
        index = context.input_pipeline_id
        return [np.full((2,), 10 * index + i) for i in range(2 + 3 * index)]

    read = _read(strategy.distribute_datasets_from_function(amounts))
    if index:
        steps = [[[10, 10], [11, 11]], [[12, 12], [13, 13]], [[14, 14], []]]
        assert read == steps
    else:
        assert read == [[[0, 0], [1, 1]], [[], []], [[], []]]

    def batches(context):
        batch = {"x": np.ones((2, 3), "float32"), "y": np.ones(2, "int32")}
        return [batch] * (1 + 2 * context.input_pipeline_id)

    *_, last = strategy.distribute_datasets_from_function(batches)
    if not index:
        for name, shape, dtype in (
            ("x", (0, 3), "float32"),
            ("y", (0,), "int32"),
        ):
            parts = strategy.experimental_local_results(last[name])
            assert len(parts) == 2
            for part in parts:
                assert tuple(part.shape) == shape
                assert keras.backend.standardize_dtype(part.dtype) == dtype


@on_workers(devices=2)
def test_an_error_in_the_data_stops_all_workers():
    strategy, index = _made()

    def dataset_fn(context):
        yield np.ones(1)
        if context.input_pipeline_id == 1:
            raise KeyError("no such row")
        yield np.ones(1)

    with pytest.raises((KeyError, keras_dist.WorkerLostError)) as error:
        _read(strategy.distribute_datasets_from_function(dataset_fn))
    if index:
        assert str(error.value) == "'no such row'"
    else:
        told = "Reading data failed on worker 1 (127.0.0.1:"
        assert type(error.value) is keras_dist.WorkerLostError
        assert str(error.value).startswith(told)


@needs_tf
@on_workers(devices=2)
def test_policies(tmp_path):
    import tensorflow as tf

    strategy, index = _made()
    own = tmp_path / str(index)
    own.mkdir()
    paths = [own / f"{number}.txt" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"{4 * number + i}\n" for i in range(4)))

    def data(policy, paths=paths):
        lines = tf.data.TextLineDataset([*map(str, paths)])
        numbers = lines.map(lambda x: tf.strings.to_number(x, tf.int32))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy[policy]
        )
        found = numbers.batch(8).with_options(options)
        return strategy.experimental_distribute_dataset(found)

    first, second = [[0, 1], [2, 3]], [[4, 5], [6, 7]]
    assert _read(data("OFF")) == [first, second, [[8, 9], [10, 11]]]
    if index:
        assert _read(data("AUTO")) == [second, [[10], [11]]]
        assert _read(data("FILE")) == [second, [[], []]]
    else:
        assert _read(data("AUTO")) == [first, [[8], [9]]]
        assert _read(data("FILE")) == [first, [[8, 9], [10, 11]]]
    with pytest.raises(ValueError, match="at least 2 files"):
        _read(data("FILE", paths[:1]))
    with strategy.scope():
        model = _model()
    with pytest.raises(ValueError, match="data of its own"):
        model.fit(data("OFF"))


def _model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    return model


@on_workers(devices=2)
def test_fit_on_pipelines_of_each_worker():
    """The weights, and what is predicted, are those of one device."""
    strategy, _ = _made()

    def pairs(context):
        """Batches of two, in turn to each pipeline; the last has one row."""
        pairs = [(x[:, None], 2 * x[:, None]) for x in _batches(2)]
        index, count = context.input_pipeline_id, context.num_input_pipelines
        return pairs[index::count]

    data = strategy.distribute_datasets_from_function(pairs)
    with strategy.scope():
        model = _model()
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    with keras_dist.OneDeviceStrategy("cpu:0").scope():
        plain = _model()
    # The first four of six batches of two; then one of two and one of one.
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10]
    x = _rows()[order][:, None]
    for _ in range(2):
        for step in (slice(0, 8), slice(8, 11)):
            plain.train_on_batch(x[step], 2 * x[step])
    for own, expected in zip(
        model.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(own, expected, rtol=1e-4)
    batches = strategy.experimental_distribute_dataset(
        [batch[:, None] for batch in _batches()]
    )
    predicted = model.predict(batches, verbose=0)
    expected = plain.predict(_rows()[:, None], verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-4)
    return [w.tolist() for w in model.get_weights()], predicted.tolist()
