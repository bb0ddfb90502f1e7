"""What workers run in `test_workers.py`."""

import collections
import dataclasses
import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_graphs import step_of

import keras_dist
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.rows import RowShard
from keras_dist.errors import ClusterError
from keras_dist.plugin.backend import get_backend
from keras_dist_tensorflow import workers as workers_module
from keras_dist_tensorflow.gradients import sum_over_workers


def devices(strategy):
    """Those of this worker, as TensorFlow lists everyone's."""
    return [str(device) for device in get_backend().list_devices()]


def dtypes(strategy):
    workers = strategy.executor.workers
    index = workers.cluster.index
    floats = ["float16", "bfloat16", "float32", "float64"]
    widths = (8, 16, 32, 64)
    names = floats + [f"{u}int{width}" for width in widths for u in ("", "u")]
    own = [tf.cast([index + 1, 2], name) for name in names]
    own += [tf.complex([index + 1.0], [2.0]), tf.zeros([0]), tf.constant(3.0)]
    sums = workers.sum(own)
    flags = tf.constant([index == 0, True])
    gathered = workers.gather([*own, flags])
    sent = workers.broadcast([*own, flags])
    joined = workers.concatenate(tf.fill([2, index], float(index)), axis=1)
    same = all(
        a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(sums, own, strict=True)
    )

    def plain(tensor):
        if tensor.dtype == tf.bfloat16:
            tensor = tf.cast(tensor, tf.float32)
        return tensor.numpy().tolist()

    return {
        "same": same,
        "sums": [plain(t) for t in sums],
        "gathered": [[plain(t) for t in each] for each in gathered],
        "sent": [plain(t) for t in sent],
        "joined": plain(joined),
    }


def nothing(strategy):
    """Sums of no numbers, and of sizes that a graph does not know."""
    workers = strategy.executor.workers

    def fn(size):
        own = tf.ones([size], tf.int64), tf.zeros([0, 3])
        return [tf.identity(each) for each in workers.sum(own)]

    traced = tf.function(fn)
    return [
        [each.numpy().tolist() for each in call(size)]
        for call in (fn, traced)
        for size in (0, 2, tf.constant(0), tf.constant(2))
    ]


def gathered(strategy):
    """gather_rows where sizes are those of the workers' shares, and not."""
    workers = strategy.executor.workers
    index, count = workers.cluster.index, workers.cluster.num_workers
    even = [RowShard(2, 2 * count)] * count
    own = [RowShard(worker, count) for worker in range(count)]
    # Shares of rows, and the sizes of a worker's tensors.
    kinds = {
        "as even shares": (even, lambda worker: (2, 2)),
        "same total": (even, lambda worker: (worker, count - 1 - worker)),
        "any": (even, lambda worker: (worker,)),
        "as own shares": (own, lambda worker: (worker, worker)),
        "more than own shares": (own, lambda worker: (3 * worker, worker)),
        "none": (own, lambda worker: (0,)),
    }
    results = {}
    for name, (shares, sizes_of) in kinds.items():

        def fn(sizes, shares=shares):
            tensors = [tf.fill([size, 2], float(index)) for size in sizes]
            tensors += [tf.constant(index), tf.fill([sizes[0]], index)]
            everyone = workers.gather_rows(tensors, shares)
            return [[tf.identity(t) for t in each] for each in everyone]

        for how, call in (("eager", fn), ("traced", tf.function(fn))):
            everyone = call([tf.constant(size) for size in sizes_of(index)])
            found = [[t.numpy().tolist() for t in each] for each in everyone]
            expected = [
                [[[float(worker)] * 2] * size for size in sizes_of(worker)]
                + [worker, [worker] * sizes_of(worker)[0]]
                for worker in range(count)
            ]
            results[name, how] = found, expected
    return results


def known_sizes(strategy):
    """gather_rows where a graph knows sizes, and where they are others."""
    workers = strategy.executor.workers
    index, count = workers.cluster.index, workers.cluster.num_workers
    shares = [RowShard(2, 2 * count)] * count
    shapes = []

    @tf.function
    def fn(rows):
        everyone = workers.gather_rows([tf.fill([rows, 3], 1.0)], shares)
        shapes.extend(each[0].shape.as_list() for each in everyone)
        return [tf.identity(each[0]) for each in everyone]

    fn(2)
    fn(5)
    try:
        fn(index + 1)
    except tf.errors.InvalidArgumentError as error:
        return shapes[: 2 * count], str(error)
    return shapes[: 2 * count], ""


class Chosen(keras.Model):
    """A model with a metric of some rows only."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(
            1, kernel_initializer="ones", name="dense"
        )
        self.chosen = keras.metrics.Mean(name="chosen")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, *args, **kwargs):
        self.chosen.update_state(tf.boolean_mask(y, y > 2.5))
        return super().compute_loss(x, y, *args, **kwargs)


def chosen_rows(model, **options):
    """Trains on batches of known size, of which each worker chooses others."""
    y = np.arange(12, dtype="float32")[:, None] % 7
    data = tf.data.Dataset.from_tensor_slices((y / 7, y))
    data = data.batch(6, drop_remainder=True)
    model.compile("sgd", "mse", **options)
    return model.fit(data, epochs=2, verbose=0, shuffle=False).history


def masked(strategy):
    found = {}
    for eagerly in (False, True):
        with strategy.scope():
            model = Chosen()
        found[eagerly] = chosen_rows(model, run_eagerly=eagerly)
    return found


def collectives_of_a_step(strategy):
    """How often each kind is in the graph of a step: for each wire dtype, of
    a model with a loss only and of one with other metrics, by rows."""
    options = strategy.executor.workers.options
    others = {"metrics": ["mae"], "weighted_metrics": ["mse"]}
    found = {}
    for wire in (None, "bfloat16"):
        strategy.executor.workers.options = CommunicationOptions(dtype=wire)
        try:
            for name, metrics in (("loss", {}), ("metrics", others)):
                found[wire, name] = _counts_by_rows(strategy, metrics)
        finally:
            strategy.executor.workers.options = options
    return found


def _counts_by_rows(strategy, metrics):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)]
        )
        model.compile("adam", "mse", **metrics)
    x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
    model.train_on_batch(x, y)
    step = step_of(model.train_function.__wrapped__)

    def count(x, y):
        graph = step.get_concrete_function((x, y, None)).graph
        kinds = collections.Counter(op.type for op in graph.get_operations())
        return {k: n for k, n in kinds.items() if k.startswith("Collective")}

    unknown = [tf.TensorSpec([None, n], tf.float32) for n in (3, 2)]
    return count(x, y), count(*unknown)


def packs(strategy):
    """Collectives of a sum, by `bytes_per_pack` and `dtype`."""
    workers = strategy.executor.workers
    options = workers.options
    tensors = [tf.fill([4], 1.0 + 2.0**-12)] * 5 + [tf.constant([1, 2])]
    found = {}
    for name, chosen in (
        ("default", CommunicationOptions()),
        ("packs", CommunicationOptions(bytes_per_pack=32)),
        ("bfloat16", CommunicationOptions(dtype="bfloat16")),
    ):
        workers.options = chosen
        try:
            step = tf.function(
                functools.partial(sum_over_workers, workers=workers)
            )
            graph = step.get_concrete_function(tensors).graph
            sums = [t.numpy().tolist() for t in step(tensors)]
        finally:
            workers.options = options
        found[name] = (
            [
                (op.inputs[0].dtype.name, op.inputs[0].shape[0])
                for op in graph.get_operations()
                if op.type == "CollectiveReduceV2"
            ],
            sums[0][0],
            sums[5],
        )
    return found


CASES = (
    devices,
    dtypes,
    nothing,
    gathered,
    known_sizes,
    masked,
    collectives_of_a_step,
    packs,
)


def everything():
    """What each case returns, by name."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    return {case.__name__: case(strategy) for case in CASES}


def ends():
    """Ends a second after the worker before it, the chief first.

    Joins its cluster once more before that, and is refused by another one.
    """
    # How long one that has ended waits for the others.
    workers_module.PARTING = 200.0
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    total = float(strategy.reduce("SUM", keras.ops.ones(()), axis=None))
    cluster = strategy.plan.cluster
    get_backend().join(dataclasses.replace(cluster), CommunicationOptions())
    other = dataclasses.replace(cluster, restarts=1)
    with pytest.raises(ClusterError, match="belongs to one cluster"):
        get_backend().join(other, CommunicationOptions())
    time.sleep(cluster.index)  # so that workers end one after the other
    return total
