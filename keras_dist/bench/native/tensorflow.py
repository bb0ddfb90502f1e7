"""Benchmarks of TensorFlow."""

import contextlib
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
from keras_dist.core.plan import Cluster
from keras_dist.plugin.workers import Workers


class GraphLoop(loops.StepLoop):
    """A tf.function around a Keras model, in a strategy of tf.distribute."""

    def __init__(
        self,
        setting: loops.Setting,
        strategy: Any,
        runs_in: loops.Scope = contextlib.nullcontext,
    ) -> None:
        self._rows = setting.size.rows
        self._strategy = strategy
        self.runs_in = runs_in
        with runs_in(), strategy.scope():
            self._model, self._optimizer = setting.model_and_optimizer()
            self.batches = self._placed(setting)
        self.step = in_replicas(strategy, self._replica_step)

    def _placed(self, setting: loops.Setting) -> list[tuple[Any, Any]]:
        return [
            (self._in_rows(x), self._in_rows(y)) for x, y in setting.batches()
        ]

    def _in_rows(self, array: Any) -> Any:
        each = len(array) // self._strategy.num_replicas_in_sync

        def rows_of(context: Any) -> Any:
            start = context.replica_id_in_sync_group * each
            return tf.constant(array[start : start + each])

        return self._strategy.experimental_distribute_values_from_function(
            rows_of
        )

    def _replica_step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loops.row_losses(y, self._model(x, training=True))
            loss = tf.nn.compute_average_loss(
                losses, global_batch_size=self._rows
            )
        variables = self._model.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        return loss


class WorkersGraphLoop(GraphLoop):
    """A `GraphLoop` that takes NumPy batches of the rows of one worker."""

    def __init__(
        self, setting: loops.Setting, worker: int, strategy: Any
    ) -> None:
        self._worker = worker
        super().__init__(setting, strategy)
        self.step = tf.function(self._whole_step)

    def _placed(self, setting: loops.Setting) -> list[tuple[Any, Any]]:
        return setting.rows_of(self._worker)

    def _whole_step(self, x: Any, y: Any) -> Any:
        # The loss over the worker's rows; a sum would be one more collective.
        loss = self._strategy.run(self._replica_step, args=(x, y))
        return loss * self._strategy.num_replicas_in_sync

    def feed(self, steps: int) -> Iterable[tuple[Any, Any]]:
        for x, y in super().feed(steps):
            yield tf.constant(x), tf.constant(y)


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

    # No autograph: it would run a converted copy of the step, and calls of the
    # step itself are counted.
    @tf.function(autograph=False)
    def whole_step(*batch: Any) -> Any:
        losses = strategy.run(step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    return whole_step


class TensorFlowNativeWorkers(NativeWorkers):
    """One `tf.distribute.MultiWorkerMirroredStrategy` for all loops."""

    text = (
        "tf.function around a Keras model and optimizer, in "
        "tf.distribute.MultiWorkerMirroredStrategy, which shares our "
        "runtime; each process takes its rows of NumPy batches."
    )

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        # A process has one runtime, and a second server would end it.
        with mock.patch.object(context.context(), "enable_collective_ops"):
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
                _resolver(workers.cluster)
            )

    def loop(self, setting: loops.Setting) -> loops.Loop:
        return WorkersGraphLoop(setting, self.worker, self._strategy)


def _resolver(cluster: Cluster) -> Any:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
        task_type="worker",
        task_id=cluster.index,
        rpc_layer="grpc",
    )


class TensorFlowBenchmarks(Benchmarks):
    """Loops in `tf.function`, and `fit`, under `tf.distribute`."""

    loop_text = (
        "tf.function around a Keras model and optimizer, as the guides have "
        "it; with several devices in tf.distribute.MirroredStrategy, on CPUs "
        "with ReductionToOneDevice."
    )
    fits_text = (
        "Mirrored is `fit` under tf.distribute.MirroredStrategy, on CPUs with "
        "ReductionToOneDevice; loop is a tf.function around `strategy.run` in "
        "it, as the guides have it, over a distributed tf.data.Dataset."
    )
    live_bytes_text = (
        "Measured: every live `tf.Variable` of the process and every eager "
        "tensor."
    )
    native_workers = TensorFlowNativeWorkers

    def native_loop(self, setting: loops.Setting) -> loops.Loop:
        if setting.num_replicas == 1:
            placed = functools.partial(tf.device, setting.devices[0])
            return GraphLoop(setting, tf.distribute.get_strategy(), placed)
        return GraphLoop(setting, native_strategy(setting.devices))

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
