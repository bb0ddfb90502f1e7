"""Cross-device operations: reductions and broadcasts between devices."""

import functools
import itertools
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_dist.core.device import parse_device
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.packing import in_packs
from keras_dist.core.packing import packs
from keras_dist.core.packing import places
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import check_shapes
from keras_dist.core.reduction import combine
from keras_dist.core.reduction import parse_reduce_op
from keras_dist.core.reduction import widened
from keras_dist.plugin.executor import Executor
from keras_dist.strategies.destinations import components
from keras_dist.strategies.destinations import devices_at
from keras_dist.strategies.destinations import executor_for
from keras_dist.strategies.destinations import spread


class CrossDeviceOps:
    """Base class of the reductions and broadcasts between replicas' devices.

    Pass an instance to `MirroredStrategy(cross_device_ops=...)`. These use it:

    - `strategy.reduce`,
    - `extended.reduce_to`, `batch_reduce_to` and `broadcast_to`,
    - `all_reduce` with `SUM` and `MEAN`,
    - values that replicas assign to variables,
    - the sum of gradients if a replica function applies an optimizer.

    `gather`, `all_gather` and the gradients of collectives do not use it. Nor
    does `fit`, because the backend compiles its step as a whole.

    A subclass defines `reduce_implementation`. It may also define
    `batch_reduce_implementation` and `broadcast_implementation`. These methods
    may call another object, such as a `ReductionToOneDevice`.

    Example:

    >>> class Loud(keras_dist.CrossDeviceOps):
    ...     inner = keras_dist.ReductionToOneDevice()
    ...
    ...     def reduce_implementation(self, reduce_op, value, to, options):
    ...         print("reducing")
    ...         return self.inner.reduce(reduce_op, value, to)
    >>> strategy = keras_dist.MirroredStrategy(
    ...     ["cpu:0", "cpu:1"], cross_device_ops=Loud()
    ... )
    >>> value = keras_dist.PerReplica([1.0, 2.0])
    >>> float(strategy.reduce("SUM", value, axis=None))
    reducing
    3.0
    """

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the components of a per-replica value.

        Args:
            reduce_op: `ReduceOp`. Its name is not accepted here.
            per_replica_value: `PerReplica` of tensors of the same shape.
            destinations: A device's name, a variable or value (for its
                devices), or a list of these.
            options: `CommunicationOptions`, used as hints.

        Returns:
            A tensor on the destination. With several destinations, it is a
            `Mirrored`.

        Raises:
            ValueError: If `reduce_op` is not a `ReduceOp`, or if shapes
                differ.

        Example:

        >>> keras_dist.ReductionToOneDevice().reduce(
        ...     keras_dist.ReduceOp.SUM,
        ...     keras_dist.PerReplica([np.ones(2), np.ones(2)]),
        ...     destinations="cpu:0",
        ... ).shape[0]
        2
        """
        return self.reduce_implementation(
            _checked(reduce_op),
            per_replica_value,
            destinations,
            options or CommunicationOptions(),
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several per-replica values, each as `reduce` does.

        Args:
            reduce_op: `ReduceOp`. Its name is not accepted here.
            value_destination_pairs: Sequence of pairs of a value and its
                destinations, as for `reduce`.
            options: `CommunicationOptions`, used as hints.

        Returns:
            List with the result for each pair.

        Raises:
            ValueError: If `reduce_op` is not a `ReduceOp`, or if shapes
                differ.
        """
        results: list[Any] = self.batch_reduce_implementation(
            _checked(reduce_op),
            list(value_destination_pairs),
            options or CommunicationOptions(),
        )
        return results

    def broadcast(self, tensor: object, destinations: object) -> Any:
        """Copies a tensor to devices.

        Args:
            tensor: Tensor to copy.
            destinations: As for `reduce`.

        Returns:
            A tensor on the destination. With several destinations, it is a
            `Mirrored`.
        """
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: object,
        destinations: object,
        options: CommunicationOptions,
    ) -> Any:
        """Implements `reduce`, with checked arguments; subclasses define it."""
        raise NotImplementedError(
            "A cross-device operation has to define `reduce_implementation`. "
            f"Received: {type(self).__name__}, which does not."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Implements `batch_reduce`; by default one value after another."""
        return [
            self.reduce_implementation(reduce_op, value, to, options)
            for value, to in value_destination_pairs
        ]

    def broadcast_implementation(
        self, tensor: object, destinations: object
    ) -> Any:
        """Implements `broadcast`; by default the backend copies the tensor."""
        executor = executor_for(tensor, destinations)
        return spread(tensor, devices_at(destinations, executor), executor)


class ReductionToOneDevice(CrossDeviceOps):
    """A reduction on one device, with copies to that device and from it.

    Args:
        reduce_to_device: String, such as `"cpu:0"`. `None` means the first
            destination.
        accumulation_fn: Callable from the list of tensors to their sum, for
            `SUM` and `MEAN`. By default the tensors are added in turn.

    Example:

    >>> ops = keras_dist.ReductionToOneDevice("cpu:0")
    >>> strategy = keras_dist.MirroredStrategy(
    ...     ["cpu:0", "cpu:1"], cross_device_ops=ops
    ... )
    >>> value = keras_dist.PerReplica([1.0, 2.0])
    >>> float(strategy.reduce("MEAN", value, axis=None))
    1.5
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._device = reduce_to_device and parse_device(reduce_to_device)
        self._accumulation_fn = accumulation_fn

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: object,
        destinations: object,
        options: CommunicationOptions,
    ) -> Any:
        executor = executor_for(per_replica_value, destinations)
        devices = devices_at(destinations, executor)
        at = devices_at(self._device or devices[0], executor)[0]
        here = [executor.put(v, at) for v in components(per_replica_value)]
        return spread(self._combined(reduce_op, here), devices, executor)

    def _combined(self, op: ReduceOp, here: list[Any]) -> Any:
        is_sum = op in (ReduceOp.SUM, ReduceOp.MEAN)
        if self._accumulation_fn is None or not is_sum:
            return combine(op, here)
        check_shapes(here)
        total = self._accumulation_fn([widened(op, v) for v in here])
        if op is ReduceOp.MEAN:
            return ops.true_divide(total, len(here))
        return total


class _ByBackend(CrossDeviceOps):
    """The backend's own reduction, of several values in packs."""

    def __init__(self, num_packs: int = 1) -> None:
        if not isinstance(num_packs, int) or num_packs < 0:
            raise ValueError(
                f"`{type(self).__name__}` needs an integer `num_packs` of at "
                f"least 0. Received: num_packs={num_packs!r}."
            )
        self._num_packs = num_packs

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: object,
        destinations: object,
        options: CommunicationOptions,
    ) -> Any:
        executor = executor_for(per_replica_value, destinations)
        reduced = executor.combine(reduce_op, components(per_replica_value))
        return spread(reduced, devices_at(destinations, executor), executor)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: list[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        executor = executor_for(*itertools.chain(*value_destination_pairs))
        values = [
            [executor.put(v, executor.plan.primary) for v in components(value)]
            for value, _ in value_destination_pairs
        ]
        reduced = in_packs(
            functools.partial(_combine_packed, executor, reduce_op),
            self._packs(values),
            values,
        )
        return [
            spread(reduced[i], devices_at(to, executor), executor)
            for i, (_, to) in enumerate(value_destination_pairs)
        ]

    def _packs(self, values: list[list[Any]]) -> Iterator[list[int]]:
        kinds = []
        for parts in values:
            check_shapes(parts)
            kinds.append((len(parts), *(str(part.dtype) for part in parts)))
        for alike in packs(kinds):
            size = 1
            if self._num_packs:
                size = -(-len(alike) // self._num_packs)
            for start in range(0, len(alike), size):
                yield alike[start : start + size]


class HierarchicalCopyAllReduce(_ByBackend):
    """The backend's reduction, under a name that ported programs use.

    The backend decides whether it copies in a hierarchy of devices. It packs
    several values of one dtype into one tensor, and reduces them at once.

    Args:
        num_packs: Integer, at least 0: the number of packs for the values of
            one dtype. With 0, each value is reduced on its own.

    Raises:
        ValueError: If `num_packs` is negative.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(
    ...     ["cpu:0", "cpu:1"],
    ...     cross_device_ops=keras_dist.HierarchicalCopyAllReduce(num_packs=2),
    ... )
    """


class NcclAllReduce(_ByBackend):
    """`HierarchicalCopyAllReduce` under another name.

    The backend decides whether it uses NCCL. The class also works on CPUs.

    Args:
        num_packs: Integer, at least 0: the number of packs for the values of
            one dtype. With 0, each value is reduced on its own.

    Raises:
        ValueError: If `num_packs` is negative.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(
    ...     ["cpu:0", "cpu:1"], cross_device_ops=keras_dist.NcclAllReduce()
    ... )
    """


def check_cross_device_ops(given: object) -> CrossDeviceOps | None:
    """Raises `TypeError` unless it is a `CrossDeviceOps` or `None`."""
    if given is None or isinstance(given, CrossDeviceOps):
        return given
    raise TypeError(
        "`cross_device_ops` must be a `keras_dist.CrossDeviceOps`, such as "
        "`keras_dist.ReductionToOneDevice()`, or None for the backend's own. "
        f"Received: {given!r} of type {type(given).__name__}."
    )


def _checked(reduce_op: object) -> ReduceOp:
    if isinstance(reduce_op, str):
        raise ValueError(
            "Cross-device operations take no names: `reduce_op` must be a "
            f"`keras_dist.ReduceOp`. Received: reduce_op={reduce_op!r}. Pass "
            "`keras_dist.ReduceOp(...)`, or use `strategy.reduce`."
        )
    return parse_reduce_op(reduce_op)


def _combine_packed(
    executor: Executor, op: ReduceOp, values: list[list[Any]]
) -> list[Any]:
    """Combines values of one dtype in one flat tensor for each replica."""
    if len(values) == 1:
        return [executor.combine(op, values[0])]
    packs = [
        executor.concatenate([ops.reshape(x, (-1,)) for x in of_replica], 0)
        for of_replica in zip(*values, strict=True)
    ]
    flat = executor.combine(op, packs)
    shapes = [ops.shape(first) for first, *_ in values]
    return [
        ops.reshape(flat[place], shape)
        for place, shape in zip(
            places(list(map(math.prod, shapes))), shapes, strict=True
        )
    ]
