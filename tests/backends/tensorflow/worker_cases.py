"""What workers run in `test_workers.py`: a script for one of them.

Usage: worker_cases.py INDEX ADDRESS,ADDRESS,... FILE

Writes what the cases return to FILE, a pickle of a dict by case.
"""

import collections
import functools
import pickle
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_dist
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.core.rows import Share
from keras_dist.plugin.backend import get_backend
from keras_dist.strategies.strategy import Strategy
from keras_dist_tensorflow.gradients import sum_over_workers


class WorkerStrategy(Strategy):
    """A replica on each device of each worker."""


def strategy_of(cluster, options=None):
    backend = get_backend()
    backend.join(cluster, options or CommunicationOptions())
    devices = tuple(backend.list_devices())
    return WorkerStrategy(
        Plan(tuple((device,) for device in devices), devices, cluster)
    )


def array(value):
    return np.asarray(keras.ops.convert_to_numpy(value))


def local(strategy, value):
    return [array(v) for v in strategy.experimental_local_results(value)]


def devices(strategy):
    return (
        [str(d) for d in get_backend().list_devices()],
        [str(d) for d in strategy.plan.devices],
        strategy.num_replicas_in_sync,
    )


def values_of(strategy):
    def value_fn(context):
        return keras.ops.convert_to_tensor(
            [float(context.replica_id_in_sync_group), 1.0]
        )

    return strategy.experimental_distribute_values_from_function(value_fn)


def reductions(strategy):
    value = values_of(strategy)
    return {
        "sum": array(strategy.reduce("SUM", value, axis=None)),
        "mean": array(strategy.reduce("MEAN", value, axis=None)),
        "sum_rows": array(strategy.reduce("SUM", value, axis=0)),
        "mean_rows": array(strategy.reduce("MEAN", value, axis=0)),
        "gather": array(strategy.gather(value, axis=0)),
        "local": local(strategy, value),
    }


def replica_ids(strategy):
    def fn():
        context = keras_dist.get_replica_context()
        return keras.ops.convert_to_tensor(
            [
                int(context.replica_id_in_sync_group),
                context.num_replicas_in_sync,
            ]
        )

    return local(strategy, strategy.run(fn))


def collectives(strategy):
    """all_reduce and all_gather in replicas, with gradients."""

    def fn(x):
        context = keras_dist.get_replica_context()
        index = float(context.replica_id_in_sync_group)

        def loss(x):
            total = context.all_reduce("SUM", x * (index + 1.0))
            joined = context.all_gather(x[: int(index) % 2 + 1], axis=0)
            value = keras.ops.sum(total * total) + keras.ops.sum(
                joined * joined * (index + 1.0)
            )
            return value, (total, joined)

        (value, (total, joined)), gradient = keras_dist.value_and_grad(
            loss, x, has_aux=True
        )
        return {"t": total, "j": joined, "g": gradient, "v": value}

    result = {}
    for name, wrap in (("eager", lambda f: f), ("traced", keras_dist.function)):
        value = strategy.experimental_distribute_values_from_function(
            lambda context: keras.ops.convert_to_tensor(
                [1.0 + context.replica_id_in_sync_group, 2.0]
            )
        )
        out = strategy.run(wrap(fn), args=(value,))
        result[name] = {k: local(strategy, v) for k, v in out.items()}
    return result


def variables(strategy):
    with strategy.scope():
        mirrored = keras.Variable(
            [1.0, 2.0], aggregation="mean", name="mirrored"
        )
        counted = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum", name="counted"
        )

    def fn():
        context = keras_dist.get_replica_context()
        index = float(context.replica_id_in_sync_group)
        mirrored.assign_add([index, 1.0])
        counted.assign_add(index + 1.0)

    strategy.run(fn)
    first = array(mirrored.value), array(counted.value)
    strategy.run(keras_dist.function(fn))
    return first, (array(mirrored.value), array(counted.value))


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


def ragged(strategy):
    """gather_rows where sizes are those of the workers' rows, and not."""
    workers = strategy.executor.workers
    index, count = workers.cluster.index, workers.cluster.num_workers
    shares = [Share(worker, count) for worker in range(count)]

    def fn(factor):
        rows = index * factor
        tensors = [
            tf.fill([rows, 2], float(index)),
            tf.constant(index),
            tf.fill([rows], index),
        ]
        everyone = workers.gather_rows(tensors, shares)
        return [[tf.identity(t) for t in each] for each in everyone]

    traced = tf.function(fn)
    results = []
    for call in (fn, traced):
        for factor in (1, 3, 0):
            everyone = call(tf.constant(factor))
            results.append([[t.numpy().tolist() for t in e] for e in everyone])
    return results


def even_shares(strategy):
    """gather_rows where all workers have 2 rows, and tensors have others."""
    workers = strategy.executor.workers
    index, count = workers.cluster.index, workers.cluster.num_workers
    shares = [Share(2, 2 * count)] * count

    def rows_of(own):
        others = count - 1 - own
        return {"as shares": (2, 2), "same total": (own, others), "any": (own,)}

    def fn(sizes):
        tensors = [tf.fill([size, 2], float(index)) for size in sizes]
        everyone = workers.gather_rows([*tensors, tf.constant(index)], shares)
        return [[tf.identity(t) for t in each] for each in everyone]

    results = {}
    for how, call in (("eager", fn), ("traced", tf.function(fn))):
        for name, sizes in rows_of(index).items():
            everyone = call([tf.constant(size) for size in sizes])
            own = [[t.numpy().tolist() for t in each] for each in everyone]
            expected = [
                [[[float(worker)] * 2] * size for size in rows_of(worker)[name]]
                + [worker]
                for worker in range(count)
            ]
            results[how, name] = own, expected
    return results


def known_sizes(strategy):
    """gather_rows where a graph knows sizes, and where they are others."""
    workers = strategy.executor.workers
    index, count = workers.cluster.index, workers.cluster.num_workers
    shares = [Share(2, 2 * count)] * count
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


def make_model():
    keras.utils.set_random_seed(3)
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(7, 4)(tokens)
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dense(8, activation="tanh")(x)
    model = keras.Model(tokens, keras.layers.Dense(2)(x))
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        ],
    )
    return model


def train(model, **options):
    """Batches of 8, and of 8 and 3 rows: even, odd, fewer than replicas."""
    rng = np.random.default_rng(0)
    history = []
    for rows, size in ((19, 8), (7, 3), (5, 4)):
        x = rng.integers(0, 7, (rows, 3))
        y = rng.integers(0, 2, (rows,))
        weight = rng.uniform(0.5, 2.0, (rows,)).astype("float32")
        history.append(
            model.fit(
                x,
                y,
                sample_weight=weight,
                batch_size=size,
                epochs=2,
                verbose=0,
                shuffle=False,
                **options,
            ).history
        )
        history.append(
            model.evaluate(x, y, batch_size=size, verbose=0, return_dict=True)
        )
    return {
        "history": history,
        "weights": [array(v) for v in model.weights],
        "predictions": model.predict(x, batch_size=2, verbose=0),
    }


def fit(strategy):
    with strategy.scope():
        model = make_model()
    return train(model)


def embeddings(strategy):
    """Lists of rows, which an optimizer treats in its own way."""
    with strategy.scope():
        table = keras.layers.Embedding(5, 2, embeddings_initializer="ones")
        table.build()
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(table.trainable_variables)
    seen = []

    def step(rows):
        _, gradients = keras_dist.value_and_grad(
            lambda: keras.ops.sum(table(rows)), table.trainable_variables
        )
        seen.append(type(gradients[0]).__name__)
        optimizer.apply(gradients, table.trainable_variables)

    rows = strategy.experimental_distribute_values_from_function(
        lambda context: keras.ops.convert_to_tensor(
            [0] * (context.replica_id_in_sync_group + 1) + [1], dtype="int32"
        )
    )
    strategy.run(step, args=(rows,))
    strategy.run(keras_dist.function(step), args=(rows,))
    return seen[0], array(table.embeddings)


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
    (step,) = [
        cell.cell_contents.__wrapped__
        for cell in model.train_function.__wrapped__.__closure__
        if "one_step_on_data" in str(cell.cell_contents)
    ]

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
    reductions,
    replica_ids,
    collectives,
    variables,
    dtypes,
    nothing,
    ragged,
    even_shares,
    known_sizes,
    masked,
    fit,
    embeddings,
    collectives_of_a_step,
    packs,
)


def main(index, addresses, path):
    addresses = tuple(addresses.split(","))
    cluster = Cluster(int(index), addresses[0], addresses)
    strategy = strategy_of(cluster)
    results = {case.__name__: case(strategy) for case in CASES}
    Path(path).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
