"""The methods of a strategy that use replicas: run, reduce, gather."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core import context
from keras_dist.core.context import inlines
from keras_dist.core.nests import always
from keras_dist.core.nests import check_counts
from keras_dist.core.nests import map_nest
from keras_dist.core.nests import refuse_objects
from keras_dist.core.nests import regroup
from keras_dist.core.options import ValueContext
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import check_gather
from keras_dist.core.reduction import check_numbers
from keras_dist.core.reduction import combine
from keras_dist.core.reduction import is_zero
from keras_dist.core.reduction import parse_reduce_op
from keras_dist.core.reduction import reduce_axes
from keras_dist.core.strategy_classes import check_args
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.fit.workers import loops
from keras_dist.fit.workers.together import raise_explained
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.plugin.chief_only import check_all_come
from keras_dist.plugin.recorder import of_its_own
from keras_dist.replica.call import run_on_one
from keras_dist.replica.call import run_on_replicas
from keras_dist.replica.function import Function
from keras_dist.replica.gradients import check_run_counts
from keras_dist.replica.gradients import current
from keras_dist.replica.on_read import SyncOnReadVariable
from keras_dist.replica.replica_context import refuse_sparse
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.replica.variables import CentralVariable


class ReplicaMethods(StrategyBase):
    """The methods of a strategy that run functions and combine values."""

    @of_its_own("`run`")
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls `fn` once for each replica, on its device.

        Args:
            fn: Callable. Inside of it, `keras_dist.get_replica_context()`
                returns the replica's context.
            args: List or tuple of positional arguments. Each replica gets its
                own component of each `PerReplica` value, at any depth. Other
                arguments are passed as they are.
            kwargs: Dict of keyword arguments, treated in the same way.
            options: `RunOptions`, which are ignored. The argument exists for
                programs written for TPUs.

        Returns:
            Nest like the result of `fn`, with a `PerReplica` in place of each
            leaf, unless the leaf is the same object on each replica. With one
            replica, it is the result of `fn` itself.

        Raises:
            ValueError: If `args` is neither a list nor a tuple, or if
                replicas return different structures.
            ReplicaDivergenceError: If replicas make different collective
                calls.
            UnsupportedModelError: If there are several replicas, and `run` is
                called in a function that is differentiated or in a
                `keras.StatelessScope`. Differentiate in `fn` instead.
            BaseException: If a replica raises an exception. It is the first
                one, with a note that names the replica. No variable is left
                partly written.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = keras_dist.PerReplica([1, 2])
        >>> strategy.run(lambda x, y: x + y, args=(x, 10))
        PerReplica:{
          0: 11,
          1: 12
        }
        """
        if (
            current.depth or keras_internals.stateless_scope() is not None
        ) and self.plan.num_replicas > 1:
            context.check_cross_replica(self, "run")
            check_run_counts(self)
        self.has_run = True
        workers = self.executor.workers
        if workers is not None:
            check_all_come("`strategy.run`")
            if not workers.is_open:
                with loops.in_run(workers, fn):
                    return self.run(fn, args, kwargs)
        compiler = self.executor.compiler
        if compiler is not None and (
            isinstance(fn, Function) or compiler.is_tracing
        ):
            return compiler.run(self, fn, args, kwargs)
        return self.run_uncompiled(fn, args, kwargs)

    def run_uncompiled(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Implements `run` for a function that is not compiled as a whole."""
        context.check_cross_replica(self, "run")
        check_args(args)
        keywords = dict(kwargs or {})
        check_counts((tuple(args), keywords), self.plan.num_local_replicas)
        self.executor.check_arguments((tuple(args), keywords))

        def on_replica(index: int) -> Any:
            def own(leaf: Any) -> Any:
                if isinstance(leaf, (PerReplica, Mirrored)):
                    return map_nest(bring, leaf.values[index])
                return bring(leaf)

            def bring(leaf: Any) -> Any:
                return self.executor.bring(leaf, index)

            positional, named = map_nest(own, (tuple(args), keywords))
            return self.executor.leave(fn(*positional, **named))

        results = self._run_on_replicas(on_replica)
        return self.joined_results(results, self.executor.per_replica)

    def joined_results(
        self, results: Sequence[Any], wrap: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """Joins the replicas' results to one immutable nest, with `wrap`."""
        # A compiled function returns tensors, never variables or captures.
        wraps = _is_array if inlines() else self.executor.is_live
        return regroup(results, wrap, wraps, self.executor.snapshot)

    def _run_on_replicas(self, on_replica: Callable[[int], Any]) -> list[Any]:
        keras_random.lend_global_seed()
        runner = self.executor.replicas
        try:
            with self.executor.hooks:
                if runner is None:
                    return [run_on_one(self, on_replica)]
                return run_on_replicas(self, runner, on_replica)
        except Exception as error:
            raise_explained(error, self.executor.workers)
            raise

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Combines a value over replicas, and along axes if `axis` is given.

        Args:
            reduce_op: `ReduceOp`, or its name in any case.
            value: Nest of per-replica values, such as a result of `run`. Any
                other value counts as equal on each replica. It has a mean,
                but no sum.
            axis: `None` combines element by element, and all shapes must be
                equal. An integer or a list of integers also combines the
                elements along these axes. Then a replica with more rows weighs
                more in a mean.

        Returns:
            Nest of tensors on the first replica's device. A mean of integers
            is a float. Sums of booleans are counts.

        Raises:
            ValueError: If the operation or the axis does not exist, or if
                shapes differ.
            TypeError: If `reduce_op` is not an operation, or if a value is not
                a number.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = keras_dist.PerReplica([[1.0, 2.0], [6.0]])
        >>> float(strategy.reduce("MEAN", value, axis=0))
        3.0
        """
        context.check_cross_replica(self, "reduce")
        op = parse_reduce_op(reduce_op)
        try:
            with (
                self._calling(f"reduce with {op.name}", value, axis),
                self._on_one_device(),
            ):
                return map_nest(
                    lambda leaf: self._reduce(op, leaf, axis), value
                )
        except (TypeError, ValueError) as error:
            refuse_objects(value, "reduce", error)
            raise

    def _calling(
        self, what: str, value: Any, axis: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which workers compare a call's arguments."""
        workers = self.executor.workers
        if workers is None:
            return contextlib.nullcontext()
        structure = map_nest(lambda leaf: "value", value)
        return workers.calling(f"{what}, axis={axis}, of {structure}")

    def _on_one_device(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context whose default is the plan's device, if only one."""
        if not self.plan.is_one_device:
            return contextlib.nullcontext()
        return self.executor.creation_scope()

    def _reduce(self, op: ReduceOp, leaf: Any, axis: Any) -> Any:
        if axis is None and self.num_replicas_in_sync == 1:
            if isinstance(leaf, PerReplica):
                check_counts(leaf, 1)
                (leaf,) = leaf.values
            return self.plain(leaf)
        if axis is None and self.cross_device_ops is None:
            combined = self.executor.combine_whole(op, leaf)
            if combined is not None:
                return combined
        values = self.to_combine(op, leaf)
        if axis is None:
            return self.combine(op, values) if values else self.plain(leaf)
        primary = self.plan.primary
        if values is None:
            here = [self.executor.put(leaf, primary)]
            return reduce_axes(op, here, axis, combine)
        here = [self.executor.put(value, primary) for value in values]
        return reduce_axes(
            op, here, axis, self.combine, self.executor.workers is not None
        )

    def to_combine(self, op: ReduceOp, leaf: Any) -> tuple[Any, ...] | None:
        """Returns components to combine, or `None` for a shared value."""
        values = self._components(leaf)
        for value in values or ():
            check_numbers(value)
        if (
            values is None
            and op is not ReduceOp.MEAN
            and self.num_replicas_in_sync > 1
            and not is_zero(leaf)
        ):
            raise ValueError(
                f"A non-DistributedValues value {leaf!r} cannot be reduced "
                f"with the given reduce op {op}: it is one value, the same on "
                "each replica. Expected: a per-replica value, as "
                "`strategy.run` returns it."
            )
        return values

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values along an axis, in replica order.

        Args:
            value: Nest of per-replica values with at least one axis, of any
                dtype. Any other value is returned as it is.
            axis: Integer, the axis to concatenate along. Sizes along this
                axis may differ between replicas. Negative integers count from
                the end.

        Returns:
            Nest of tensors on the first replica's device.

        Raises:
            ValueError: If ranks, or sizes along other axes, differ.
            NotImplementedError: If a value is sparse.
            RuntimeError: If called in replica context. Use `all_gather` there.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = keras_dist.PerReplica([[1, 2], [3]])
        >>> keras.ops.convert_to_numpy(strategy.gather(value, axis=0))
        array([1, 2, 3], dtype=int32)
        """
        context.check_cross_replica(self, "gather")
        try:
            with self._calling("gather", value, axis):
                return map_nest(lambda leaf: self._gather(leaf, axis), value)
        except (TypeError, ValueError) as error:
            refuse_objects(value, "gather", error)
            raise

    def _gather(self, leaf: Any, axis: int) -> Any:
        values = self._components(leaf)
        if values is None:
            refuse_sparse(leaf, "gather")
            check_gather([np.empty(np.shape(leaf))], axis)
            return self.plain(leaf)
        for value in values:
            refuse_sparse(value, "gather")
        primary = self.plan.primary
        here = [self.executor.put(value, primary) for value in values]
        return self.executor.concatenate(here, check_gather(here, axis))

    def _components(self, leaf: Any) -> tuple[Any, ...] | None:
        """Returns a leaf's components, or `None` for a value shared by all."""
        if isinstance(leaf, SyncOnReadVariable):
            return tuple(component.value for component in leaf.values)
        if isinstance(leaf, (keras.Variable, Mirrored)):
            return None
        check_counts(leaf, self.executor.num_components)
        if isinstance(leaf, DistributedValues):
            return leaf.values
        # With one replica a worker, values are not in a `PerReplica`.
        is_only = self.plan.num_local_replicas == 1 < self.plan.num_workers
        return (leaf,) if is_only else None

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a per-replica value on this worker.

        Args:
            value: Nest of per-replica values, such as a result of `run`.

        Returns:
            Tuple with a nest for each replica of this worker. If the value is
            not distributed, or with one replica, the tuple has only that
            value.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = keras_dist.PerReplica([1, 2])
        >>> strategy.experimental_local_results({"a": value})
        ({'a': 1}, {'a': 2})
        """
        if isinstance(value, DistributedValues):
            return tuple(value.values)
        if not isinstance(value, (list, tuple, Mapping)):
            return (value,)

        def component(leaf: Any, index: int) -> Any:
            is_split = isinstance(leaf, DistributedValues)
            is_one = isinstance(leaf, CentralVariable)
            return leaf.values[index] if is_split and not is_one else leaf

        return tuple(
            map_nest(functools.partial(component, index=index), value)
            for index in range(self.plan.num_local_replicas)
        )

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a per-replica value from a function of the replica.

        Args:
            value_fn: Callable that takes a
                `keras_dist.experimental.ValueContext`. It is called once for
                each replica of this worker.

        Returns:
            `PerReplica` of the results, even if they are equal. With one
            replica, it is the result itself.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_distribute_values_from_function(
        ...     lambda context: context.replica_id_in_sync_group
        ... )
        PerReplica:{
          0: 0,
          1: 1
        }
        """
        context.check_cross_replica(
            self, "experimental_distribute_values_from_function"
        )
        plan = self.plan
        with self._on_one_device():
            values = [
                map_nest(
                    self._kept_value,
                    value_fn(
                        ValueContext(plan.first_replica + i, plan.num_replicas)
                    ),
                )
                for i in range(plan.num_local_replicas)
            ]
        return regroup(values, self.executor.per_replica, always)

    def _kept_value(self, leaf: Any) -> Any:
        """Copies a NumPy array, since the user's function may overwrite it."""
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        return self.executor.snapshot(leaf)

    def plain(self, leaf: Any) -> Any:
        """Returns the current value of a leaf that is equal on all replicas."""
        if isinstance(leaf, Mirrored):
            leaf = leaf.values[0]
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        return self.executor.snapshot(leaf)


def _is_array(leaf: Any) -> bool:
    """Returns true for a leaf that is a tensor in a compiled function."""
    return ops.is_tensor(leaf) or isinstance(leaf, (np.ndarray, np.generic))
