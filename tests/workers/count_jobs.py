"""PyTorch: counts what workers send."""

import gc
import os

import keras
import numpy as np

import keras_dist
from keras_dist.bench import measure
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.bodies import NO_BODY
from keras_dist.plugin.membership import alone_on_purpose

# By name, what `compile` gets.
METRICS = {
    "loss": None,
    "none": [],
    "adding": ["mae", "mse"],
    "others": ["mae", keras.metrics.RootMeanSquaredError],
}


class Counts:
    """How often workers met, until `taken`."""

    def __init__(self, workers):
        import torch

        self._found = dict.fromkeys(("sums", "early", "gathers"), 0)
        start_sum, exchange = workers.start_sum, workers.exchange

        def counted_sum(flat):
            self._found["sums"] += 1
            # A task of the backward pass is at work.
            is_early = torch._C._current_graph_task_id() != -1
            self._found["early"] += is_early
            return start_sum(flat)

        def counted_exchange(call, head, body=NO_BODY):
            # Small gradients travel by it; large ones are compared once.
            is_sum = call.key.startswith("gradients")
            self._found["sums"] += is_sum and body is not NO_BODY
            self._found["gathers"] += not is_sum
            return exchange(call, head, body)

        workers.start_sum = workers.sums._start = counted_sum
        workers.exchange = counted_exchange

    def taken(self):
        found, self._found = self._found, dict.fromkeys(self._found, 0)
        return found


def everything(steps):
    # Each of the kernels is a bucket, with the bias before it.
    options = keras_dist.experimental.CommunicationOptions(
        bytes_per_pack=4 * 40 * 40
    )
    strategy = keras_dist.MultiWorkerMirroredStrategy(
        communication_options=options
    )
    workers = strategy.executor.workers
    counts = Counts(workers)
    workers.options = options._replace(bytes_per_pack=0)
    found = {
        kind: fitted(strategy, counts, steps, 8, metrics)
        for kind, metrics in METRICS.items()
    }
    workers.options = workers.options._replace(dtype="bfloat16")
    found["bfloat16"] = fitted(strategy, counts, steps, width=8)
    workers.options = options
    found["buckets"] = fitted(strategy, counts, steps, width=40)
    found["told"] = told(strategy, counts, Told)
    found["told_before"] = told(strategy, counts, ToldBefore)
    found["twice"] = twice(strategy, counts)
    found["broken"] = broken(strategy, counts)

    workers.options = options._replace(bytes_per_pack=0)
    found["drawn"] = drawn(strategy)
    found["experts"] = experts(strategy)
    found["positive"] = positive(strategy)

    import torch.distributed

    found["has_default_group"] = torch.distributed.is_initialized()
    found["listening"] = listening()
    found["calls"] = {
        "plain": calls_a_step(alone_on_purpose),
        "mirrored": calls_a_step(strategy.scope),
        "sharded": calls_a_step(
            keras_dist.MultiWorkerMirroredStrategy(variables="sharded").scope
        ),
    }
    return found


def calls_a_step(scope):
    """Counts the Python calls of a step of `fit`."""
    x = np.ones((80, 8), "float32")
    with scope():
        # Its kernels are large enough to be divided.
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])

        def fit(steps):
            rows = 4 * steps
            model.fit(x[:rows], x[:rows, 0], batch_size=4, verbose=0)

        fit(2)  # everything is built
        return measure.calls_a_step(fit, steps=10)[0]


def fitted(strategy, counts, steps, width, metrics=("mae", "mse")):
    x = np.ones((4 * steps, width), "float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((width,)),
                keras.layers.Dense(width, use_bias=False),
                keras.layers.Dense(width, use_bias=False),
                keras.layers.Dense(width, use_bias=False),
            ]
        )
        made = [m if isinstance(m, str) else m() for m in metrics or ()]
        model.compile("sgd", "mse", metrics=metrics and made)
    # Variables that the first step makes are the chief's, too.
    model.optimizer.build(model.trainable_variables)
    model.test_on_batch(x[:4], x[:4])
    counts.taken()
    for start in range(0, 4 * steps, 4):
        rows = x[start : start + 4]
        model.train_on_batch(rows, rows)
    return counts.taken()


def compiled(scope, make, inputs, value, optimizer, **options):
    """A model that has seen inputs, with the same value in each weight."""
    with scope:
        model = make()
        for each in inputs:
            model(each)
        model.compile(optimizer, "mse", **options)
    model.set_weights([np.full(w.shape, value) for w in model.weights])
    return model


def one_device():
    return keras_dist.OneDeviceStrategy("cpu:0").scope()


def sums_of_weights(model):
    return [w.sum().tolist() for w in model.get_weights()]


class Passed(keras.Model):
    """Its gradients are those of some backward passes; then it may fail."""

    def __init__(self, passes):
        super().__init__()
        # Each of them is a bucket.
        self.first = keras.layers.Dense(1600, use_bias=False)
        self.second = keras.layers.Dense(1, use_bias=False)
        self.passes, self.is_broken = passes, False

    def call(self, inputs):
        return self.second(self.first(inputs))

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        for _ in range(self.passes):
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
        if self.is_broken:
            raise ZeroDivisionError
        variables = self.trainable_weights
        self.optimizer.apply([v.value.grad for v in variables], variables)
        return {"loss": loss}


STEP = (
    np.arange(1.0, 9.0, dtype="float32").reshape(4, 2),
    np.ones((4, 1), "float32"),
)


def passed(scope, passes, steps):
    sgd = keras.optimizers.SGD(0.01)
    model = compiled(scope, lambda: Passed(passes), STEP[:1], 0.01, sgd)
    for _ in range(steps):
        model.train_on_batch(*STEP)
    return model


def twice(strategy, counts):
    expected = sums_of_weights(passed(one_device(), 2, 3))
    counts.taken()
    weights = sums_of_weights(passed(strategy.scope(), 2, 3))
    return {"weights": weights, "expected": expected, **counts.taken()}


class Told(keras.Model):
    """Its metrics tell of variables that the update has changed."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False)
        self.sum = keras.metrics.Sum(name="sum")

    def call(self, inputs):
        return self.dense(inputs)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.sum.update_state(x)
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "steps": self.optimizer.iterations}


class ToldBefore(Told):
    """It reads PyTorch's own tensor before any metric."""

    def compute_metrics(self, *args, **kwargs):
        kernel = self.dense.held[0].detach().sum()
        return {**super().compute_metrics(*args, **kwargs), "kernel": kernel}


def told(strategy, counts, kind):
    """Logs of steps with 5 rows, with a NaN, and where a worker has none."""
    x = np.arange(16.0, dtype="float32").reshape(8, 2) / 16
    y = np.ones((8, 1), "float32")
    y[6] = np.nan

    def logs(scope):
        adam = keras.optimizers.Adam(0.1)
        model = compiled(scope, kind, [x], 0.5, adam, metrics=["mae"])
        model.dense.held = [model.dense.kernel.value]
        counts.taken()
        found = [
            model.train_on_batch(x[part], y[part], return_dict=True)
            for part in (slice(0, 5), slice(5, 6), slice(6, 8))
        ]
        return [{k: float(v) for k, v in each.items()} for each in found]

    expected = logs(one_device())
    return {"logs": logs(strategy.scope()), "expected": expected}


def broken(strategy, counts):
    """What a failed step leaves of the bucket that it had sent."""
    from keras_dist_torch.buckets import Overlap

    # After two steps, all workers expect its bucket.
    model = passed(strategy.scope(), 1, 2)
    counts.taken()
    model.is_broken = True
    try:
        model.train_on_batch(*STEP)
    except ZeroDivisionError as error:
        assert error.__traceback__  # which keeps what the step had
        left = [
            len(each._sent) + len(each._ready)
            for each in gc.get_objects()
            if isinstance(each, Overlap)
        ]
    early = counts.taken()["early"]
    model.is_broken = False
    model.train_on_batch(*STEP)
    return {"early": early, "left": left, "weights": sums_of_weights(model)}


def drawn(strategy):
    """Masks of each worker, and what is drawn outside of steps after them."""
    import torch

    layer = keras.layers.Dropout(0.5)
    mask = strategy.run(lambda: layer(np.ones((1, 64)), training=True))
    masks = strategy.gather(mask, axis=0)
    return {
        "differ": bool((masks[0] != masks[1]).any()),
        "next": float(torch.rand(())),
    }


class Experts(keras.Model):
    """Which layer is used depends on the rows."""

    def __init__(self):
        super().__init__()
        self.left = keras.layers.Dense(3)
        self.right = keras.layers.Dense(3)
        self.joined = keras.layers.Dense(1)

    def call(self, inputs):
        left = float(inputs[0, 0]) > 0
        return self.joined(self.left(inputs) if left else self.right(inputs))


def experts(strategy):
    x = np.array([[1.0, 2.0]] * 2 + [[-1.0, 2.0]] * 2, "float32")
    with strategy.scope():
        model = Experts()
        model(x)
        model(-x)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [w.tolist() for w in model.get_weights()]


class Positive(keras.Model):
    """Its metric sees only some of the rows, which the data decides."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, inputs):
        return self.dense(inputs)

    def test_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.mean.update_state(x[x[:, 0] > 0])
        return {"mean": self.mean.result()}


def positive(strategy):
    x = np.array([[1.0], [2.0], [3.0], [-1.0]], "float32")
    with strategy.scope():
        model = Positive()
        model(x)
        model.compile("sgd", "mse")
    return model.evaluate(x, x, batch_size=4, verbose=0)


def listening():
    """The addresses that sockets of this process listen on."""
    import os
    import socket

    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # it was closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for path, family, size in [
        ("/proc/net/tcp", socket.AF_INET, 4),
        ("/proc/net/tcp6", socket.AF_INET6, 16),
    ]:
        with open(path) as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    packed = bytes.fromhex(fields[1].split(":")[0])
                    words = [packed[i : i + 4][::-1] for i in range(0, size, 4)]
                    found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def group_with(means):
    """The process group, and a sum, of workers with some GPUs."""
    from keras_dist_torch import workers

    is_shared = means == "shared gpu"
    own = is_shared or os.environ["KERAS_DIST_WORKER_INDEX"] == "0"
    workers._has_nccl = lambda: own
    if is_shared:
        workers.own_gpus = lambda: ["GPU-1"]
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    group = get_backend()._workers.group
    return type(group).__name__, float(strategy.reduce("SUM", 1.0, axis=None))
