"""ReplicaContext: collectives and merge calls inside a replica function."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.core import nests
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import check_gather
from keras_dist.core.reduction import check_numbers
from keras_dist.core.reduction import combine
from keras_dist.core.reduction import parse_reduce_op
from keras_dist.plugin.replica import OnlyReplica
from keras_dist.plugin.replica import Replica
from keras_dist.replica.state import current_step
from keras_dist.replica.strategy_core import StrategyBase


class ReplicaContext:
    """One replica's view of a replica function, with its collectives.

    Get it with `keras_dist.get_replica_context()`. Every replica has to make
    the same calls in the same order; otherwise each replica gets an error.

    Args:
        strategy: The `Strategy` that runs the replica.
        replica_id_in_sync_group: Integer, the replica's index among the
            replicas of all workers.
        replica: The backend's `Replica`. Without one, this replica is the
            only one, and its calls wait for no other.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def replica_fn():
    ...     context = keras_dist.get_replica_context()
    ...     return context.all_reduce("SUM", 1.0)
    >>> [float(x) for x in strategy.run(replica_fn).values]
    [2.0, 2.0]
    """

    def __init__(
        self,
        strategy: StrategyBase,
        replica_id_in_sync_group: int,
        replica: Replica | None = None,
    ) -> None:
        self._strategy = strategy
        self._id = replica_id_in_sync_group
        self._replica = replica or OnlyReplica(strategy.cross_replica)

    @property
    def strategy(self) -> StrategyBase:
        """The strategy that runs the replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica among those of all workers, an integer."""
        return self._id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, over all workers."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices of this replica."""
        return tuple(
            str(d) for d in self._strategy.plan.replicas[self._replica.index]
        )

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Waits for all replicas, then calls `merge_fn` once for all of them.

        Args:
            merge_fn: Callable, run in cross-replica context. It gets the
                strategy, then the replicas' arguments as `PerReplica` values.
            args: List or tuple of this replica's positional arguments.
            kwargs: Dict of this replica's keyword arguments.

        Returns:
            The result of `merge_fn`; in place of each per-replica value in
            it, this replica's component.

        Raises:
            ReplicaDivergenceError: If another replica does not make the call.
        """

        def merge(everyone: list[Any]) -> Any:
            merged_args, merged_kwargs = nests.regroup(
                everyone, self._strategy.executor.per_replica
            )
            return merge_fn(self._strategy, *merged_args, **merged_kwargs)

        arguments = (tuple(args), dict(kwargs or {}))
        result = self._replica.rendezvous("merge_call", merge, arguments)
        return self._own_copy(self._replica.components_of(result))

    def _value_now(self, tensor: object) -> Any:
        # `ops.convert_to_tensor` on TensorFlow may return the variable.
        if isinstance(tensor, keras.Variable):
            tensor = tensor.value
        return self._strategy.executor.snapshot(tensor)

    def _own_copy(self, nest: object) -> Any:
        """Copies a shared result, of which `run` would else make one value."""
        if self.num_replicas_in_sync == 1:
            return nest

        def copy(leaf: object) -> Any:
            if isinstance(leaf, keras.Variable) or not ops.is_tensor(leaf):
                return leaf
            return ops.copy(leaf)

        return nests.map_nest(copy, nest)

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: object, options: object = None
    ) -> Any:
        """Combines a value over replicas and gives each the result.

        Gradients flow: for `SUM`, a replica's gradient is the sum of all
        replicas' gradients of the result.

        Args:
            reduce_op: `ReduceOp`, or its name.
            value: Nest of tensors, of the same shapes on each replica. The
                rows of `tf.IndexedSlices` may differ between replicas; their
                sum and mean stay sparse.
            options: `CommunicationOptions`, hints that may be ignored.

        Returns:
            Nest of tensors on this replica's device. `MEAN` of integers is a
            float.

        Raises:
            ValueError: If shapes differ between replicas.
            TypeError: If a value is neither tensor nor number.
            ReplicaDivergenceError: If another replica does not make the call.
        """
        op = parse_reduce_op(reduce_op)
        try:
            for leaf in nests.leaves_of(value):
                check_numbers(leaf)
            if (
                self._strategy.cross_device_ops is not None
                and self.num_replicas_in_sync > 1
                and op in (ReduceOp.SUM, ReduceOp.MEAN)
                and not any(map(_is_slices, nests.leaves_of(value)))
            ):
                return self._all_reduce_together(op, value)
            return _map_named(
                lambda leaf, path: self._all_reduce(op, leaf, path), value
            )
        except (TypeError, ValueError) as error:
            nests.refuse_objects(value, "all_reduce", error)
            raise

    def all_gather(
        self, value: object, axis: int, options: object = None
    ) -> Any:
        """Concatenates the replicas' values and gives each the result.

        Gradients flow: a replica's gradient is its slice of the sum of all
        replicas' gradients of the result.

        Args:
            value: Nest of tensors with at least one axis. Sizes along `axis`
                may differ between replicas.
            axis: Integer, the axis to concatenate along. Negative ones count
                from the end.
            options: `CommunicationOptions`, hints that may be ignored.

        Returns:
            Nest of tensors on this replica's device.

        Raises:
            ValueError: If ranks, or sizes along other axes, differ.
            ReplicaDivergenceError: If another replica does not make the call.
        """
        try:
            return _map_named(
                lambda leaf, path: self._all_gather(
                    leaf, axis, f"all_gather along axis {axis}{path}"
                ),
                value,
            )
        except (TypeError, ValueError) as error:
            nests.refuse_objects(value, "all_gather", error)
            raise

    def _all_reduce_slices(self, op: ReduceOp, slices: Any) -> Any:
        """Concatenates sparse slices; slices with the same index add up."""
        values = self.all_gather(slices.values, axis=0)
        indices = self.all_gather(slices.indices, axis=0)
        if op is ReduceOp.MEAN:
            values = values / self.num_replicas_in_sync
        return type(slices)(values, indices, slices.dense_shape)

    def _all_reduce(self, op: ReduceOp, leaf: object, path: str) -> Any:
        if _is_slices(leaf) and op in (ReduceOp.SUM, ReduceOp.MEAN):
            return self._all_reduce_slices(op, leaf)
        refuse_sparse(leaf, "all_reduce")
        tensor = ops.convert_to_tensor(leaf)
        if self.num_replicas_in_sync == 1:
            return self._value_now(tensor)
        what = f"all_reduce with {op.name}{path}"
        self._note_traced(what, str(tensor.shape))
        if not _has_gradients(tensor):
            combine_values = self._strategy.combine
            combined = self._replica.rendezvous(
                what, lambda v: combine_values(op, v), tensor
            )
            # Each replica gets its own tensor, as it does with gradients.
            return ops.copy(combined)
        if op is ReduceOp.SUM:
            return self._replica.all_sum(what, tensor)
        if op is ReduceOp.MEAN:
            total = self._replica.all_sum(what, tensor)
            return total / self.num_replicas_in_sync
        # Other operations run on the gathered values, so that gradients flow.
        everyone = self._all_gather(ops.expand_dims(tensor, 0), 0, what)
        return combine(op, [everyone[i] for i in range(everyone.shape[0])])

    def _all_reduce_together(self, op: ReduceOp, nest: object) -> Any:
        """All-reduces a nest with the strategy's `CrossDeviceOps`."""
        named = list(nests.named_leaves(nest))
        for _, leaf in named:
            refuse_sparse(leaf, "all_reduce")
        tensors = [ops.convert_to_tensor(leaf) for _, leaf in named]
        paths = ",".join(path and f" of {path}" for path, _ in named)
        what = f"all_reduce with {op.name}{paths}"
        self._note_traced(what, ", ".join(str(t.shape) for t in tensors))

        def combined(everyone: list[Any]) -> list[Any]:
            columns = list(zip(*everyone, strict=True))
            return self._strategy.combine_all(op, columns)

        def tied(tensor: Any, total: Any) -> Any:
            if not _has_gradients(tensor):
                return ops.copy(total)
            if op is ReduceOp.MEAN:
                tensor = tensor / self.num_replicas_in_sync
            return self._replica.all_sum(what, tensor, total)

        detached = [
            ops.stop_gradient(tensor) if _has_gradients(tensor) else tensor
            for tensor in tensors
        ]
        totals = self._replica.rendezvous(what, combined, detached)
        return nests.pack(nest, map(tied, tensors, totals))

    def _note_traced(self, what: str, layout: str) -> None:
        """Notes what a program exchanges, for workers to compare."""
        workers = self._strategy.executor.workers
        # One trace of JAX is for all replicas, whose index is then a tensor.
        index = self._replica.index
        is_first = not isinstance(index, int) or index == 0
        if is_first and workers is not None and workers.is_tracing:
            context.note_exchange(f"{what} of {layout}")

    def _all_gather(
        self, leaf: object, axis: int, what: str = "all_gather"
    ) -> Any:
        refuse_sparse(leaf, "all_gather")
        tensor = ops.convert_to_tensor(leaf)
        executor = self._strategy.executor

        if self.num_replicas_in_sync == 1:
            check_gather([tensor], axis)
            return self._value_now(tensor)
        self._note_traced(what, f"{len(tensor.shape)} axes")
        if not _has_gradients(tensor):

            def joined(tensors: list[Any]) -> Any:
                along = check_gather(tensors, axis)
                return executor.concatenate(tensors, along)

            return ops.copy(self._replica.rendezvous(what, joined, tensor))
        return self._replica.all_gather(what, tensor, axis)


def refuse_sparse(value: object, method: str) -> None:
    """Raises `NotImplementedError` if a value is sparse."""
    kind = type(value).__name__
    if kind in ("IndexedSlices", "SparseTensor", "BCOO", "JAXSparse") or (
        getattr(value, "is_sparse", False) is True
    ):
        raise NotImplementedError(
            f"{method} does not support {kind}.\nReceived: {value!r}. "
            "Expected: a dense tensor. First make it dense, with a function of "
            "the framework."
        )


def _map_named(fn: Callable[[Any, str], Any], nest: object) -> Any:
    """Calls `fn(leaf, path)` for each leaf of a nest."""
    named = list(nests.named_leaves(nest))
    results = [fn(leaf, path and f" of {path}") for path, leaf in named]
    return nests.pack(nest, results)


def _is_slices(value: object) -> bool:
    """Tells `tf.IndexedSlices`, such as an embedding's gradient, by name."""
    return type(value).__name__ == "IndexedSlices"


def _has_gradients(tensor: Any) -> bool:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return bool(keras.backend.is_float_dtype(dtype))


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that this thread runs.

    Returns:
        A `ReplicaContext`, or `None` in cross-replica context: under a
        strategy's scope and outside of `run`. Programs written for
        `tf.distribute` test for `None`. The error `'NoneType' object has no
        attribute 'all_reduce'` therefore means that a function was called
        directly rather than by `strategy.run`; in cross-replica context, use
        `strategy.reduce` instead. Without a strategy, the context of the
        default strategy.

    Example:

    >>> keras_dist.get_replica_context().replica_id_in_sync_group
    0
    """
    current: ReplicaContext | None = context.current_replica_context()
    if current is not None:
        return current
    step = current_step()
    if step is not None:
        return ReplicaContext(step.strategy, step.replica.id, step.replica)
    if context.has_strategy() or context.in_cross_replica_context():
        return None
    return ReplicaContext(context.default_strategy(), 0)
