"""Steps of `fit`, run once on each replica under Keras' own trainer."""

import contextlib
import copy
import functools
import re
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

from keras_dist.plugins import WHOLE
from keras_dist.plugins import PerReplica
from keras_dist.plugins import Places
from keras_dist.plugins import Plan
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import RowShard
from keras_dist.plugins import StepRunner
from keras_dist.plugins import SyncOnReadVariable
from keras_dist.plugins import UnequalLengths
from keras_dist.plugins import current_call
from keras_dist.plugins import get_mask
from keras_dist.plugins import group_of
from keras_dist.plugins import leaves_of
from keras_dist.plugins import lend_global_seed
from keras_dist.plugins import map_nest
from keras_dist.plugins import named
from keras_dist.plugins import ranges
from keras_dist.plugins import set_mask
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.atomic import wait_for
from keras_dist_tensorflow.batches import FirstSeen
from keras_dist_tensorflow.batches import OwnRowsTensor
from keras_dist_tensorflow.batches import cut_batch
from keras_dist_tensorflow.batches import in_memory
from keras_dist_tensorflow.compiler import TensorFlowCompiler
from keras_dist_tensorflow.executor import TensorFlowExecutor
from keras_dist_tensorflow.gradients import sum_over_workers
from keras_dist_tensorflow.gradients import weighted_sum
from keras_dist_tensorflow.origins import StepSizes
from keras_dist_tensorflow.origins import mark_rows
from keras_dist_tensorflow.origins import note_graph
from keras_dist_tensorflow.origins import noting
from keras_dist_tensorflow.tf_variables import on_device
from keras_dist_tensorflow.tf_variables import one_copy
from keras_dist_tensorflow.trainer import OneReplica
from keras_dist_tensorflow.trainer import build
from keras_dist_tensorflow.trainer import recorded
from keras_dist_tensorflow.workers import TensorFlowWorkers

T = TypeVar("T")
# The end of TensorFlow's text of such an error.
_REFUSED = "<keras_dist error {}>"


class StepExecutor(TensorFlowExecutor, StepRunner):
    """Runs steps on replicas; subclasses keep variables and `play`."""

    updater: Any
    looks_at_draws = True
    traces_steps = True

    def __init__(
        self, plan: Plan, workers: TensorFlowWorkers | None = None
    ) -> None:
        super().__init__(plan, workers)
        self.compiler = TensorFlowCompiler(plan.num_replicas, workers)
        self._sizes = StepSizes()
        self._unequal = UnequalLengths()
        # The errors that steps raise while they run, by their number.
        self._refused: list[Exception] = []

    shows_batches = False

    def watch_first(self, batches: object, see: Callable[[Any], None]) -> Any:
        return FirstSeen(batches, see)

    @abstractmethod
    def play(
        self,
        fn: Callable[[Replica], T],
        shares: Sequence[RowShard],
        group: ReplicaGroup,
    ) -> list[T]:
        """Calls `fn(replica)` for each local replica, on its device."""

    def per_replica(self, values: Sequence[Any]) -> Any:
        # A native per-replica value can be an argument and a result of a
        # `tf.function`; ours can't.
        if not tf.executing_eagerly() and all(_is_number(v) for v in values):
            values = [tf.convert_to_tensor(value) for value in values]
        if all(tf.is_tensor(value) for value in values):
            return runtime_internals.NativePerReplica(values)
        return PerReplica(values)

    def refuse(
        self,
        flags: Sequence[Any],
        error: Callable[[int], Exception],
        values: Sequence[Any] = (),
    ) -> list[Any]:
        if tf.executing_eagerly():
            return super().refuse(flags, error, values)
        checks = []
        for place, flag in enumerate(flags):
            self._refused.append(error(place))
            mark = _REFUSED.format(len(self._refused) - 1)
            text = f"{self._refused[-1]} {mark}"
            checks.append(tf.debugging.Assert(tf.equal(flag, 0.0), [text]))
            wait_for(checks[-1])
        with tf.control_dependencies(checks):
            return [_same_as(value) for value in values]

    def explained(self, error: BaseException) -> BaseException:
        match = re.search(_REFUSED.format("([0-9]+)"), str(error))
        if not match or not isinstance(error, tf.errors.OpError):
            return error
        return copy.copy(self._refused[int(match[1])])

    def check_equal(
        self, values: Sequence[Any], error: Callable[[], Exception]
    ) -> None:
        if tf.executing_eagerly():
            super().check_equal(values, error)
            return
        try:
            message = str(error())
        except NotImplementedError:  # the text has the values in it
            message = (
                "Replicas left different values in a variable that aggregates "
                "none."
            )
        first, *others = values
        if self.workers is not None:
            others += [tensors[0] for tensors in self.workers.gather([first])]
        for other in others:
            if first.dtype.is_floating or first.dtype.is_complex:
                same = tf.experimental.numpy.allclose(first, other, rtol=1e-4)
            else:
                same = tf.reduce_all(tf.equal(first, other))
            wait_for(tf.debugging.Assert(same, [message, first, other]))

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        keras_internals.set_native_strategy(model, OneReplica())
        reset = functools.partial(_reset_unbuilt_metrics, model)
        methods: dict[str, Callable[..., Any]] = {
            "_maybe_symbolic_build": reset
        }
        if self.workers is not None:
            methods |= recorded(model, self.workers.recorder)
        return methods

    def build(self, model: keras.Model, step: str, batch: object) -> None:
        build(model, step, batch)

    def prepare(self, model: keras.Model) -> None:
        # Each thread has its own, and a trace must not create variables.
        lend_global_seed()
        self.moves.follow(model, self.updater)
        if model.jit_compile:
            warnings.warn(
                "XLA compilation is off: TensorFlow can't compile a step for "
                f"several devices. Received: jit_compile=True for model "
                f"'{model.name}' on {self.plan.num_replicas} replicas. Pass "
                "`jit_compile=False` to `compile` to silence this.",
                stacklevel=2,
            )
            model.jit_compile = False

    def run(
        self,
        fn: Callable[[Replica, Any], T],
        batch: object,
        *,
        places: Places | None = None,
    ) -> list[T]:
        first, count = self.plan.first_replica, self.plan.num_local_replicas
        if self.workers is not None and tf.executing_eagerly():
            # A model that was not to run eagerly when its data was opened.
            batch = self.workers.whole_batch(in_memory(batch), self._shares_of)
        batch = tree.map_structure(_as_tensor, batch)
        if places is not None:
            batch = tree.map_structure(_of_any_length, batch)
        parts, shares, edges = cut_batch(
            batch,
            self.plan.num_replicas,
            slice(first, first + count),
            self._unequal,
            places,
        )
        self._mark([tree.flatten(part) for part in parts])
        group = group_of(self.plan, self.workers, edges)
        return self._play_named(fn, [(part,) for part in parts], shares, group)

    def _shares_of(self, total: int) -> list[range]:
        first, count = self.plan.first_replica, self.plan.num_local_replicas
        shares = self.rows_in_fit(np.zeros((total, 0)))
        return shares[first : first + count]

    def own_rows_of(self, model: keras.Model) -> type[OwnRowsTensor] | None:
        # Steps that look for rows in draws, one by one, divide them otherwise.
        return None if model.run_eagerly else OwnRowsTensor

    def rows_in_fit(self, batch: object) -> list[range]:
        return ranges(cut_batch(batch, self.plan.num_replicas)[2])

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        shares = [WHOLE] * self.plan.num_local_replicas
        group = ReplicaGroup(self.workers, self.plan.first_replica)
        return self._play_named(fn, [()] * len(shares), shares, group)

    def _play_named(
        self,
        fn: Callable[..., T],
        arguments: Sequence[tuple[Any, ...]],
        shares: Sequence[RowShard],
        group: ReplicaGroup,
    ) -> list[T]:
        def on_replica(replica: Replica) -> T:
            with named(replica.id, self.plan.num_replicas), noting():
                return fn(replica, *arguments[replica.index])

        # AutoGraph of a caller's `tf.function` would convert what runs here.
        plain = tf.autograph.experimental.do_not_convert
        played: list[T] = plain(self.play)(plain(on_replica), shares, group)
        return played

    def check_arguments(self, nest: object) -> None:
        # Per-replica arguments are taken for rows of a batch.
        values = [
            leaf.values
            for leaf in leaves_of(nest)
            if isinstance(leaf, PerReplica)
        ]
        self._mark(
            [tree.flatten(arguments) for arguments in zip(*values, strict=True)]
        )

    def leave(self, nest: object) -> Any:
        return nest if tf.executing_eagerly() else map_nest(_own_value, nest)

    def _mark(self, by_replica: Sequence[Sequence[Any]]) -> None:
        """Marks replicas' tensors as rows, for sums of sparse gradients."""
        mark_rows(leaf for tensors in by_replica for leaf in tensors)
        shapes = [
            [tf.TensorShape(x.shape) for x in tensors if tf.is_tensor(x)]
            for tensors in by_replica
        ]
        # The known sizes of the first axes of each replica's tensors.
        rows = [
            {s[0] for s in replica_shapes if s.rank} - {None}
            for replica_shapes in shapes
        ]
        self._sizes = StepSizes(rows, runtime_internals.tensors_so_far())

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        in_graph = not tf.executing_eagerly()
        if in_graph and any(
            isinstance(gradient, tf.IndexedSlices)
            for column in gradients
            for gradient in column
        ):
            note_graph(tf.compat.v1.get_default_graph())
        sums = []
        for variable, *column in zip(variables, *gradients, strict=True):
            # An optimizer may have a `tf.Variable`, which has no path.
            name = getattr(variable, "path", variable.name)
            with on_device(self.parameter_device(variable)):
                sums.append(weighted_sum(column, weights, self._sizes, name))
        with on_device(self.plan.primary):
            sums += [
                tf.cast(tf.convert_to_tensor(x), tf.float32) for x in numbers
            ]
            return sum_over_workers(sums, self.workers)

    def carries(self, variables: Sequence[keras.Variable]) -> bool:
        return self.workers is not None and self.workers.options.dtype is None

    def left_scope(self) -> contextlib.AbstractContextManager[None]:
        return one_copy()

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        with tf.init_scope(), self.creation_scope():
            yield


def _reset_unbuilt_metrics(
    model: keras.Model, iterator: object = None, data_batch: object = None
) -> None:
    """Replaces Keras' method, because steps build from shapes, not batches."""
    for metric in keras_internals.metrics_to_build(model):
        metric.reset_state()


def _same_as(value: object) -> Any:
    """Returns a tensor that the open control dependencies come before."""
    mask = get_mask(value)
    same = tf.identity(value)
    if mask is not None:
        set_mask(same, mask)
    return same


def _own_value(leaf: object) -> Any:
    """Replaces a variable that differs between replicas with its value."""
    if not isinstance(leaf, keras.Variable):
        return leaf
    call = current_call()
    is_written = call is not None and id(leaf) in call.writes
    if is_written or isinstance(leaf, SyncOnReadVariable):
        return tf.identity(leaf.value)
    return leaf


def _of_any_length(leaf: object) -> Any:
    """Hides a graph's number of rows, so that what has rows is known."""
    if tf.executing_eagerly() or not isinstance(leaf, tf.Tensor):
        return leaf
    if not leaf.shape.rank or leaf.shape[0] is None:
        return leaf
    shape = [None, *leaf.shape[1:]]
    return tf.compat.v1.placeholder_with_default(leaf, shape)


def _as_tensor(leaf: object) -> Any:
    """Converts an array to a tensor, which can carry the mark of rows."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, np.ndarray, np.generic))
