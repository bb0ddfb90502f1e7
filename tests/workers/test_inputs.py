"""Distributed input on workers that are processes."""

import importlib.util
import itertools

import keras
import numpy as np
import pytest

import keras_dist
from workers import clusters

NUM_WORKERS, NUM_REPLICAS = 2, 2
ROWS = 11
HAS_TF = importlib.util.find_spec("tensorflow") is not None

# They share one job.
pytestmark = pytest.mark.runs_on("jax", "tensorflow", "torch")
needs_tf = pytest.mark.skipif(
    not HAS_TF, reason="The data is of tensorflow, which is not installed."
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each worker has read."""
    folder = tmp_path_factory.mktemp("files")
    for index in range(3):
        lines = [f"{4 * index + i}\n" for i in range(4)]
        (folder / f"{index}.txt").write_text("".join(lines))
    return clusters.run(
        _read_everything,
        (str(folder),),
        workers=NUM_WORKERS,
        devices=NUM_REPLICAS,
        timeout=400,
    )


def _read_everything(folder):
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    return {
        "alike": {
            name: _read(strategy.experimental_distribute_dataset(data))
            for name, data in _kinds().items()
        },
        "sums": _sums(strategy),
        "amounts": _read(strategy.distribute_datasets_from_function(_amounts)),
        "shapes": _empty_shapes(strategy),
        "failure": _fail(strategy),
        "policies": _read_policies(strategy, folder) if HAS_TF else None,
        **_fit(strategy),
    }


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
        import torch

        kinds["torch_loader"] = torch.utils.data.DataLoader(
            _rows(), batch_size=4
        )
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


def _sums(strategy):
    """Sums over all replicas, in each step."""
    data = strategy.experimental_distribute_dataset(_batches())
    return [
        float(
            strategy.reduce(
                "SUM",
                strategy.run(keras.ops.sum, args=(batch,)),
                axis=None,
            )
        )
        for batch in data
    ]


def _amounts(context):
    """Worker 0 has two batches, worker 1 has five."""
    index = context.input_pipeline_id
    return [np.full((2,), 10 * index + i) for i in range(2 + 3 * index)]


def _empty_shapes(strategy):
    def dataset_fn(context):
        batch = {"x": np.ones((2, 3), "float32"), "y": np.ones(2, "int32")}
        return [batch] * (1 + 2 * context.input_pipeline_id)

    *_, last = strategy.distribute_datasets_from_function(dataset_fn)
    return [
        [
            (tuple(part.shape), keras.backend.standardize_dtype(part.dtype))
            for part in strategy.experimental_local_results(last[name])
        ]
        for name in ("x", "y")
    ]


def _fail(strategy):
    """The error of data that can't be read on worker 1."""

    def dataset_fn(context):
        yield np.ones(1)
        if context.input_pipeline_id == 1:
            raise KeyError("no such row")
        yield np.ones(1)

    try:
        _read(strategy.distribute_datasets_from_function(dataset_fn))
    except (KeyError, keras_dist.WorkerLostError) as error:
        return type(error).__name__, str(error)


def _read_policies(strategy, folder):
    import tensorflow as tf

    paths = [f"{folder}/{index}.txt" for index in range(3)]
    names = ("AUTO", "FILE", "OFF")

    def dataset(policy, paths):
        lines = tf.data.TextLineDataset(paths)
        numbers = lines.map(lambda x: tf.strings.to_number(x, tf.int32))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy[policy]
        )
        return numbers.batch(8).with_options(options)

    found = {
        name: _read(
            strategy.experimental_distribute_dataset(dataset(name, paths))
        )
        for name in names
    }
    too_few = dataset("FILE", paths[:1])
    try:
        _read(strategy.experimental_distribute_dataset(too_few))
    except ValueError as error:
        found["too few"] = str(error)
    try:
        data = strategy.experimental_distribute_dataset(dataset("OFF", paths))
        with strategy.scope():
            model = _model()
        model.fit(data)
    except ValueError as error:
        found["off in fit"] = str(error)
    return found


def _model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    return model


def _pairs(context):
    """Batches of two, in turn to each pipeline; the last one has one row."""
    pairs = [(x[:, None], 2 * x[:, None]) for x in _batches(2)]
    index, count = context.input_pipeline_id, context.num_input_pipelines
    return pairs[index::count]


def _fit(strategy):
    """Weights after `fit` on each worker's own data, and on one device."""
    data = strategy.distribute_datasets_from_function(_pairs)
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
    batches = strategy.experimental_distribute_dataset(
        [batch[:, None] for batch in _batches()]
    )
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "expected": [w.tolist() for w in plain.get_weights()],
        "predicted": model.predict(batches, verbose=0).tolist(),
        "expected prediction": plain.predict(_rows()[:, None], verbose=0),
    }


def test_every_kind_is_cut_alike(found):
    steps = [
        [[[0.0], [1.0]], [[4.0], [5.0]], [[8.0], [9.0]]],
        [[[2.0], [3.0]], [[6.0], [7.0]], [[10.0], []]],
    ]
    for worker, expected in zip(found, steps, strict=True):
        assert len(worker["alike"]) >= 5
        for name, read in worker["alike"].items():
            assert read == expected, name


def test_sums_are_global(found):
    for worker in found:
        assert worker["sums"] == [6.0, 22.0, 27.0]


def test_a_worker_with_less_data_gets_empty_batches(found):
    first, second = (worker["amounts"] for worker in found)
    assert first == [[[0, 0], [1, 1]], [[], []], [[], []]]
    assert second == [
        [[10, 10], [11, 11]],
        [[12, 12], [13, 13]],
        [[14, 14], []],
    ]
    assert found[0]["shapes"] == [
        [((0, 3), "float32")] * 2,
        [((0,), "int32")] * 2,
    ]


def test_an_error_in_the_data_stops_all_workers(found):
    first, second = (worker["failure"] for worker in found)
    assert first[0] == "WorkerLostError"
    assert first[1].startswith("Reading data failed on worker 1 (127.0.0.1:")
    assert second == ("KeyError", "'no such row'")


@needs_tf
def test_policies(found):
    first, second = (worker["policies"] for worker in found)
    assert first["AUTO"] == [[[0, 1], [2, 3]], [[8], [9]]]
    assert second["AUTO"] == [[[4, 5], [6, 7]], [[10], [11]]]
    assert first["FILE"] == [[[0, 1], [2, 3]], [[8, 9], [10, 11]]]
    assert second["FILE"] == [[[4, 5], [6, 7]], [[], []]]
    everything = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert first["OFF"] == second["OFF"] == everything
    for policies in (first, second):
        assert "at least 2 files" in policies["too few"]
        assert "data of its own" in policies["off in fit"]


def test_fit_on_pipelines_of_each_worker(found):
    for worker in found:
        for own, expected in zip(
            worker["weights"], worker["expected"], strict=True
        ):
            np.testing.assert_allclose(own, expected, rtol=1e-4)
    assert found[0]["weights"] == found[1]["weights"]


def test_predict_gives_all_rows_in_order(found):
    for worker in found:
        np.testing.assert_allclose(
            worker["predicted"], worker["expected prediction"], rtol=1e-4
        )
    assert all(
        a["predicted"] == b["predicted"] for a, b in itertools.pairwise(found)
    )
