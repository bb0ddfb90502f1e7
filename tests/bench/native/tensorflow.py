"""Training with TensorFlow: loops in `tf.function`, and `tf.distribute`."""

import functools
import gc
from unittest import mock

import tensorflow as tf
from tensorflow.python.eager import context

from bench import settings
from keras_dist.bench.fit import FitArm
from keras_dist.core.device import parse_device

LOOP_TEXT = (
    "tf.function around a Keras model and optimizer, as in TensorFlow's "
    "guides; several devices are in tf.distribute.MirroredStrategy, on "
    "CPUs with ReductionToOneDevice."
)
FITS_TEXT = (
    "Mirrored is `fit` under tf.distribute.MirroredStrategy, on CPUs "
    "with ReductionToOneDevice; loop is a tf.function around "
    "`strategy.run` in it, as in TensorFlow's guides, over a distributed "
    "tf.data.Dataset."
)
LIVE_BYTES_TEXT = (
    "Measured: every live `tf.Variable` of the process and every eager tensor."
)


def replica_step(setting, strategy):
    """Makes a Keras model, and returns the step of a replica that trains it."""
    with strategy.scope():
        model, optimizer = setting.model_and_optimizer()

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = settings.row_losses(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(
                losses, global_batch_size=setting.rows
            )
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step


def in_rows(strategy, array):
    """Returns an array whose rows are on the replicas' devices."""
    each = len(array) // strategy.num_replicas_in_sync

    def rows_of(replica):
        start = replica.replica_id_in_sync_group * each
        return tf.constant(array[start : start + each])

    return strategy.experimental_distribute_values_from_function(rows_of)


class CustomLoop(settings.StepLoop):
    """A tf.function around a compiled Keras model, in tf.distribute."""

    def __init__(self, task, strategy):
        with strategy.scope():
            self._model = task.model()
        self._task = task
        self._strategy = strategy
        super().__init__(in_replicas(strategy, self._replica_step))

    def _replica_step(self, x, y):
        model = self._model
        with tf.GradientTape() as tape:
            # In a native strategy Keras divides the loss by the number of
            # replicas itself.
            loss = model.compute_loss(x, y, model(x, training=True))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def feed(self, steps):
        dataset = tf.data.Dataset.from_tensor_slices(self._task.data(steps))
        batches = dataset.batch(self._task.rows, drop_remainder=True)
        return self._strategy.experimental_distribute_dataset(batches)


def in_replicas(strategy, step):
    """Returns a function of a batch that runs a step, and adds losses up."""

    def whole_step(*batch):
        losses = strategy.run(step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    return tf.function(whole_step, autograph=False)


def native_strategy(devices):
    """Returns a `tf.distribute.MirroredStrategy` on devices."""
    on_cpu = devices[0].startswith("cpu")
    return tf.distribute.MirroredStrategy(
        list(devices),
        # On CPUs, the default's collectives of a second model in the process
        # can be mistaken for those of the first.
        tf.distribute.ReductionToOneDevice() if on_cpu else None,
    )


def native_loop(setting):
    if setting.num_replicas == 1:
        placed = functools.partial(tf.device, setting.devices[0])
        with placed():
            alone = replica_step(setting, tf.distribute.get_strategy())
            batches = [
                (tf.constant(x), tf.constant(y)) for x, y in setting.batches()
            ]
        return settings.StepLoop(tf.function(alone), batches, runs_in=placed)
    strategy = native_strategy(setting.devices)
    step = in_replicas(strategy, replica_step(setting, strategy))
    batches = [
        (in_rows(strategy, x), in_rows(strategy, y))
        for x, y in setting.batches()
    ]
    return settings.StepLoop(step, batches)


def other_loops(setting):
    """Returns none: the native loop is around a Keras model already."""
    return {}


def native_fits(task, devices, stack):
    strategy = native_strategy(devices)
    return {
        "Mirrored": lambda: FitArm(task, strategy.scope),
        "loop": lambda: CustomLoop(task, strategy),
    }


def live_bytes(model):
    totals = {}
    seen = set()
    for each in gc.get_objects():
        # Not `isinstance`, which makes lazy modules load themselves.
        kind = type(each)
        if issubclass(kind, tf.Variable):
            if issubclass(kind, tf.distribute.DistributedValues):
                continue  # its components are variables too
            each, tensor = each, each.handle
        elif issubclass(kind, tf.Tensor):
            tensor = each
        else:
            continue
        if tf.is_symbolic_tensor(tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if each.dtype.size and each.dtype not in (tf.resource, tf.variant):
            name = parse_device(each.device)
            num_bytes = each.shape.num_elements() * each.dtype.size
            totals[name] = totals.get(name, 0) + num_bytes
    return totals


class NativeWorkers:
    """One `tf.distribute.MultiWorkerMirroredStrategy` for all loops."""

    text = (
        "tf.function around a Keras model and optimizer, in "
        "tf.distribute.MultiWorkerMirroredStrategy, which shares our "
        "runtime; each process takes its rows of NumPy batches."
    )

    def __init__(self, workers):
        self._worker = workers.cluster.index
        addresses = list(workers.cluster.addresses)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}),
            task_type="worker",
            task_id=self._worker,
            rpc_layer="grpc",
        )
        # A process has one runtime, and a second server would end it.
        with mock.patch.object(context.context(), "enable_collective_ops"):
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)

    def loop(self, setting):
        strategy = self._strategy
        step = replica_step(setting, strategy)

        def whole_step(x, y):
            # The loss over the worker's rows; a sum would be one more
            # collective.
            loss = strategy.run(step, args=(x, y))
            return loss * strategy.num_replicas_in_sync

        return settings.StepLoop(
            tf.function(whole_step),
            setting.rows_of(self._worker),
            lambda batch: map(tf.constant, batch),
        )

    def other_loops(self, setting, strategy):
        return {}

    def collectives(self, arm, steps):
        """Counts nothing: TensorFlow does not tell."""

    def close(self):
        """Leaves the runtime to keras_dist."""
