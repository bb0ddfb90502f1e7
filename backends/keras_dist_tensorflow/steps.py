"""Steps of `fit`, run once on each replica under Keras' own trainer."""

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_dist.core.components import Component
from keras_dist.core.device import Device
from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.plan import Plan
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import Share
from keras_dist.core.rows import UnequalLengths
from keras_dist.core.rows import ranges
from keras_dist.core.values import PerReplica
from keras_dist.internals.keras_internals import make_global_seed
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.plugin.replica import group_of
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist.plugin.runner import StepRunner
from keras_dist.replica.state import current_call
from keras_dist.replica.variables import SyncOnReadVariable
from keras_dist_tensorflow import internals
from keras_dist_tensorflow.atomic import wait_for
from keras_dist_tensorflow.batches import cut_batch
from keras_dist_tensorflow.compiler import TensorFlowCompiler
from keras_dist_tensorflow.constant_indices import StepSizes
from keras_dist_tensorflow.first_seen import FirstSeen
from keras_dist_tensorflow.gradients import finished
from keras_dist_tensorflow.gradients import weighted_sum
from keras_dist_tensorflow.operation_internals import tensors_so_far
from keras_dist_tensorflow.origins import mark_rows
from keras_dist_tensorflow.origins import noting
from keras_dist_tensorflow.tapes import install_tapes
from keras_dist_tensorflow.trainer import OneReplica
from keras_dist_tensorflow.trainer import build
from keras_dist_tensorflow.trainer import install_plain_models
from keras_dist_tensorflow.variables import Moves
from keras_dist_tensorflow.variables import NativeComponent
from keras_dist_tensorflow.variables import components
from keras_dist_tensorflow.variables import default_device
from keras_dist_tensorflow.variables import device_of
from keras_dist_tensorflow.variables import devices_of
from keras_dist_tensorflow.variables import is_native
from keras_dist_tensorflow.variables import native_name
from keras_dist_tensorflow.variables import put
from keras_dist_tensorflow.variables import snapshot
from keras_dist_tensorflow.workers import TensorFlowWorkers

T = TypeVar("T")
DIVERGED = "Replicas left different values in a variable that aggregates none."


class StepExecutor(Executor, StepRunner):
    """Runs each step of a model once on each replica.

    Subclasses keep the variables and run the replicas (`play`). This class
    splits the data and combines gradients, metrics and losses.

    Attributes:
        updater: The native strategy, or its stand-in, through which Keras'
            optimizers update variables.
    """

    workers: TensorFlowWorkers | None
    updater: Any
    traces_steps = True

    def __init__(
        self, plan: Plan, workers: TensorFlowWorkers | None = None
    ) -> None:
        super().__init__(plan, workers)
        self.compiler = TensorFlowCompiler(
            plan.num_replicas, workers, plan.is_one_device
        )
        install_plain_models()
        install_tapes()
        self._moves = Moves()
        self._sizes = StepSizes()
        self._unequal = UnequalLengths()

    def watch_first(self, batches: Any, see: Callable[[Any], None]) -> Any:
        return FirstSeen(batches, see)

    @abstractmethod
    def play(
        self,
        fn: Callable[[int, Replica], T],
        shares: Sequence[Share],
        group: ReplicaGroup,
    ) -> dict[int, T]:
        """Calls `fn(index, replica)` on the device of each local replica.

        Returns a dict from index to the result of the call. `shares` has one
        element for each local replica.
        """

    @property
    def replicas(self) -> ReplicaRunner:
        return self

    def default_device(self) -> str:
        return default_device()

    def devices_of(self, variable: keras.Variable) -> tuple[Device, ...]:
        native = internals.native_variable(variable)
        return (self.plan.primary,) if native is None else devices_of(native)

    def put(self, value: Any, device: Device) -> Any:
        return put(value, device)

    def snapshot(self, value: Any, index: int = 0) -> Any:
        return snapshot(value, index)

    def is_live(self, value: Any) -> bool:
        return is_native(value)

    def device_of(self, tensor: Any) -> Device:
        return device_of(tensor) or self.plan.primary

    def per_replica(self, values: Sequence[Any]) -> Any:
        # A native per-replica value can be an argument and a result of a
        # `tf.function`; ours can't.
        if not tf.executing_eagerly() and all(_is_number(v) for v in values):
            values = [tf.convert_to_tensor(value) for value in values]
        if all(tf.is_tensor(value) for value in values):
            return internals.native_per_replica(values)
        return PerReplica(values)

    def copy_of(self, variable: keras.Variable, index: int) -> Any:
        copies = components(internals.native_variable(variable))
        return copies[index % len(copies)].read_value()

    def component(
        self, variable: keras.Variable, index: int, value: Callable[[], Any]
    ) -> Component:
        return NativeComponent(value, self.plan.devices[index])

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        with tf.device(native_name(self.plan.primary)):
            own = tf.concat(values, axis)
        if self.workers is None:
            return own
        return self.workers.concatenate(own, axis)

    def check_equal(
        self, values: Sequence[Any], error: Callable[[], Exception]
    ) -> None:
        if tf.executing_eagerly():
            super().check_equal(values, error)
            return
        message = _message(error)
        first, *others = values
        if self.workers is not None:
            others += [each[0] for each in self.workers.gather([first])]
        for other in others:
            if first.dtype.is_floating or first.dtype.is_complex:
                same = tf.experimental.numpy.allclose(first, other, rtol=1e-4)
            else:
                same = tf.reduce_all(tf.equal(first, other))
            wait_for(tf.debugging.Assert(same, [message, first, other]))

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        internals.set_native_strategy(model, OneReplica())
        return {"_maybe_symbolic_build": _building_in_the_step(model)}

    def build(self, model: keras.Model, step: str, batch: Any) -> None:
        build(model, step, batch)

    def prepare(self, model: keras.Model) -> None:
        # Each thread has its own seed, and a trace must not create variables.
        make_global_seed()
        self._moves.follow(model, self.updater)
        if model.jit_compile:
            warnings.warn(
                "XLA compilation is off: TensorFlow can't compile a step for "
                f"several devices. Received: jit_compile=True for model "
                f"'{model.name}' on {self.plan.num_replicas} replicas. Pass "
                "`jit_compile=False` to `compile` to silence this.",
                stacklevel=2,
            )
            model.jit_compile = False

    def recover(self, model: keras.Model) -> None:
        # A trace that failed would make the next `fit` fail with another error.
        internals.forget_functions(model)

    def run(
        self,
        fn: Callable[[Replica, Any], T],
        batch: Any,
        is_whole: bool = False,
    ) -> list[T]:
        first, count = self.plan.first_replica, self.plan.num_local_replicas
        parts, shares, edges = cut_batch(
            tree.map_structure(_as_tensor, batch),
            self.plan.num_replicas,
            slice(first, first + count),
            self._unequal,
            is_whole,
        )
        self._mark([tree.flatten(part) for part in parts])

        def on_replica(index: int, replica: Replica) -> T:
            with noting():
                return fn(replica, parts[index])

        group = group_of(self.plan, self.workers, edges)
        results = self.play(on_replica, shares, group)
        return [results[index] for index in range(count)]

    def rows_in_fit(self, batch: Any) -> list[range]:
        return ranges(cut_batch(batch, self.plan.num_replicas)[2])

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        count = self.plan.num_local_replicas

        def on_replica(_: int, replica: Replica) -> T:
            with noting():
                return fn(replica)

        group = ReplicaGroup(self.workers, self.plan.first_replica)
        results = self.play(on_replica, [WHOLE] * count, group)
        return [results[index] for index in range(count)]

    def check_arguments(self, nest: Any) -> None:
        # Per-replica arguments are taken for rows of a batch.
        values = [
            leaf.values
            for leaf in leaves_of(nest)
            if isinstance(leaf, PerReplica)
        ]
        self._mark([tree.flatten(own) for own in zip(*values, strict=True)])

    def leave(self, nest: Any) -> Any:
        return nest if tf.executing_eagerly() else map_nest(_own_value, nest)

    def _mark(self, each: Sequence[Sequence[Any]]) -> None:
        """Marks each replica's tensors as rows, for sums of sparse gradients.

        Their origins tell which indices come from the batch.
        """
        mark_rows(leaf for own in each for leaf in own)
        rows = [_row_counts(own) for own in each]
        self._sizes = StepSizes(rows, tensors_so_far())

    def weighted_sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> list[Any]:
        return self._summed(gradients, weights, [""] * len(gradients[0]))

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        names = [getattr(v, "path", v.name) for v in variables]
        return self._summed(gradients, weights, names)

    def _summed(
        self,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        names: Sequence[str],
    ) -> list[Any]:
        with tf.device(native_name(self.plan.primary)):
            own = self.locally_summed(gradients, weights, names)
            return finished(own, self.workers)

    def locally_summed(
        self,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        names: Sequence[str],
    ) -> list[Any]:
        """Sums gradients over this worker's replicas, as input of `finished`.

        Sparse sums stay in parts, because workers may have to sum those.
        """
        return weighted_sum(gradients, weights, self._sizes, names)

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        with tf.init_scope(), tf.summary.record_if(False):
            yield

    def rehearsing(self) -> contextlib.AbstractContextManager[Any]:
        return self.probing()

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        with tf.init_scope(), self.creation_scope():
            yield


def _building_in_the_step(model: keras.Model) -> Callable[..., None]:
    """Returns a `_maybe_symbolic_build` that leaves building to the steps.

    Steps build the model from shapes and draw no batch. Metrics that Keras
    would build and reset here are reset.
    """

    def _maybe_symbolic_build(
        iterator: Any = None, data_batch: Any = None
    ) -> None:
        for metric in internals.metrics_to_build(model):
            metric.reset_state()

    return _maybe_symbolic_build


def _own_value(leaf: Any) -> Any:
    """Replaces a variable that differs between replicas with its value.

    A graph can't return variables, and in cross-replica context the variable
    would read as the combination of all replicas' values.
    """
    if not isinstance(leaf, keras.Variable):
        return leaf
    call = current_call()
    is_written = call is not None and id(leaf) in call.writes
    if is_written or isinstance(leaf, SyncOnReadVariable):
        return tf.identity(leaf.value)
    return leaf


def _as_tensor(leaf: Any) -> Any:
    """Converts an array to a tensor, which can carry the mark of rows.

    `train_on_batch` gives NumPy arrays to a step that is not compiled.
    """
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _row_counts(leaves: Sequence[Any]) -> set[int]:
    """Returns the known sizes of the first axes of a replica's tensors."""
    shapes = [tf.TensorShape(x.shape) for x in leaves if tf.is_tensor(x)]
    return {shape[0] for shape in shapes if shape.rank} - {None}


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.ndarray, np.generic))


def _message(error: Callable[[], Exception]) -> str:
    """Returns the error's text, or `DIVERGED` if it needs values in a graph."""
    try:
        return str(error())
    except NotImplementedError:  # the text has the values in it
        return DIVERGED
