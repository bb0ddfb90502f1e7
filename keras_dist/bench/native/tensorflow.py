"""Benchmarks of TensorFlow."""

import functools
import gc
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.eager import context

from keras_dist.bench import loops
from keras_dist.bench import tasks
from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.benchmarks import NativeWorkers
from keras_dist.core.device import Device
from keras_dist.core.device import parse_device
from keras_dist.plugin.workers import Workers


def replica_step(setting: loops.Setting, strategy: Any) -> Callable[..., Any]:
    """Makes a Keras model, and returns the step of a replica that trains it."""
    with strategy.scope():
        model, optimizer = setting.model_and_optimizer()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loops.row_losses(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(
                losses, global_batch_size=setting.size.rows
            )
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step


def in_rows(strategy: Any, array: Any) -> Any:
    """Returns an array whose rows are on the replicas' devices."""
    each = len(array) // strategy.num_replicas_in_sync

    def rows_of(context: Any) -> Any:
        start = context.replica_id_in_sync_group * each
        return tf.constant(array[start : start + each])

    return strategy.experimental_distribute_values_from_function(rows_of)


class CustomLoop(tasks.ModelLoop):
    """A tf.function around a compiled Keras model, in tf.distribute."""

    def __init__(self, task: tasks.Task, strategy: Any) -> None:
        with strategy.scope():
            super().__init__(task.model(), step=CustomLoop._replica_step)
        self._task = task
        self._strategy = strategy
        self.step = in_replicas(strategy, self._replica_step)

    def _replica_step(self, *rows: Any) -> Any:
        model = self.model
        x, y = tf.nest.pack_sequence_as(self._task.data(1), rows)
        with tf.GradientTape() as tape:
            # In a native strategy Keras divides the loss by the number of
            # replicas itself.
            loss = model.compute_loss(x, y, model(x, training=True))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def feed(self, steps: int) -> Iterable[tuple[Any, ...]]:
        # `from_tensor_slices` takes a list of inputs for one array.
        arrays = tuple(tf.nest.flatten(self._task.data(steps)))
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        batches = dataset.batch(self._task.size.rows, drop_remainder=True)
        distributed: Iterable[tuple[Any, ...]] = (
            self._strategy.experimental_distribute_dataset(batches)
        )
        return distributed


def in_replicas(strategy: Any, step: Callable[..., Any]) -> Any:
    """Returns a function of a batch that runs a step, and adds losses up."""

    def whole_step(*batch: Any) -> Any:
        losses = strategy.run(step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    # No autograph: it would run a converted copy of the step, and calls of the
    # step itself are counted.
    return tf.function(whole_step, autograph=False)


class TensorFlowNativeWorkers(NativeWorkers):
    """One `tf.distribute.MultiWorkerMirroredStrategy` for all loops."""

    text = (
        "tf.function around a Keras model and optimizer, in "
        "tf.distribute.MultiWorkerMirroredStrategy, which shares our "
        "runtime; each process takes its rows of NumPy batches."
    )

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        addresses = list(workers.cluster.addresses)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}),
            task_type="worker",
            task_id=self.worker,
            rpc_layer="grpc",
        )
        # A process has one runtime, and a second server would end it.
        with mock.patch.object(context.context(), "enable_collective_ops"):
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)

    def loop(self, setting: loops.Setting) -> loops.Loop:
        strategy = self._strategy
        step = replica_step(setting, strategy)

        def whole_step(x: Any, y: Any) -> Any:
            # The loss over the worker's rows; a sum would be one more
            # collective.
            loss = strategy.run(step, args=(x, y))
            return loss * strategy.num_replicas_in_sync

        return loops.StepLoop(
            tf.function(whole_step),
            setting.rows_of(self.worker),
            lambda batch: map(tf.constant, batch),
        )


class TensorFlowBenchmarks(Benchmarks):
    """Loops in `tf.function`, and `fit`, under `tf.distribute`."""

    loop_text = (
        "tf.function around a Keras model and optimizer, as in TensorFlow's "
        "guides; several devices are in tf.distribute.MirroredStrategy, on "
        "CPUs with ReductionToOneDevice."
    )
    fits_text = (
        "Mirrored is `fit` under tf.distribute.MirroredStrategy, on CPUs "
        "with ReductionToOneDevice; loop is a tf.function around "
        "`strategy.run` in it, as in TensorFlow's guides, over a distributed "
        "tf.data.Dataset."
    )
    live_bytes_text = (
        "Measured: every live `tf.Variable` of the process and every eager "
        "tensor."
    )
    native_workers = TensorFlowNativeWorkers

    def native_loop(self, setting: loops.Setting) -> loops.Loop:
        if setting.num_replicas == 1:
            placed = functools.partial(tf.device, setting.devices[0])
            with placed():
                alone = replica_step(setting, tf.distribute.get_strategy())
                batches = [
                    (tf.constant(x), tf.constant(y))
                    for x, y in setting.batches()
                ]
            return loops.StepLoop(tf.function(alone), batches, runs_in=placed)
        strategy = native_strategy(setting.devices)
        step = in_replicas(strategy, replica_step(setting, strategy))
        batches = [
            (in_rows(strategy, x), in_rows(strategy, y))
            for x, y in setting.batches()
        ]
        return loops.StepLoop(step, batches)

    def native_fits(
        self, task: tasks.Task, devices: tuple[str, ...]
    ) -> dict[str, Callable[[], tasks.ModelLoop]]:
        strategy = native_strategy(devices)
        return {
            "Mirrored": lambda: tasks.FitLoop(task, strategy.scope),
            "loop": lambda: CustomLoop(task, strategy),
        }

    def live_bytes(self, model: keras.Model) -> dict[Device, int]:
        totals: dict[Device, int] = {}
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


def native_strategy(devices: Sequence[str]) -> Any:
    """Returns a `tf.distribute.MirroredStrategy` on devices."""
    on_cpu = devices[0].startswith("cpu")
    return tf.distribute.MirroredStrategy(
        list(devices),
        # On CPUs, the default's collectives of a second model in the process
        # can be mistaken for those of the first.
        tf.distribute.ReductionToOneDevice() if on_cpu else None,
    )
