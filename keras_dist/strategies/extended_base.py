"""The devices, the reductions and the broadcasts of `strategy.extended`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from keras_dist.core import context
from keras_dist.core.nests import map_nest
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import parse_reduce_op
from keras_dist.core.values import PerReplica
from keras_dist.strategies.cross_device_ops import HierarchicalCopyAllReduce
from keras_dist.strategies.destinations import devices_at
from keras_dist.strategies.destinations import spread

if TYPE_CHECKING:
    from keras_dist.strategies.deprecated import DeprecatedMethods

_BY_BACKEND = HierarchicalCopyAllReduce(num_packs=0)


class ExtendedBase:
    """Devices, and reductions and broadcasts to them."""

    def __init__(self, strategy: "DeprecatedMethods") -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Names of the compute devices, in replica order."""
        return tuple(str(device) for device in self._strategy.plan.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of the devices that hold variables; the first is primary."""
        plan = self._strategy.plan
        return tuple(str(device) for device in plan.variable_devices)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False, since replica functions accept tensors of new shapes."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """True with several workers, since each of them runs the program."""
        return self._strategy.plan.cluster is not None

    @property
    def experimental_should_init(self) -> bool:
        """True on the chief, since it initializes variables."""
        return self._strategy.plan.is_chief

    @property
    def should_checkpoint(self) -> bool:
        """True on the chief, since it saves checkpoints."""
        return self._strategy.plan.is_chief

    @property
    def should_save_summary(self) -> bool:
        """True on the chief, since it writes logs."""
        return self._strategy.plan.is_chief

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines a value over replicas, and puts the result on devices.

        Args:
            reduce_op: `ReduceOp`, or its name in any case.
            value: Nest of per-replica values. A value that is not
                distributed counts as equal on each replica.
            destinations: A device's name, a variable (for the devices of its
                copies), a per-replica value (for its devices), or a list of
                these.
            options: `CommunicationOptions`, used as hints.

        Returns:
            Nest of tensors on the destination. With several destinations, it
            is a nest of `Mirrored` values.

        Raises:
            ValueError: If the operation does not exist, or if shapes differ.
            RuntimeError: If called in replica context.
        """
        context.check_cross_replica(self._strategy, "reduce_to")
        op = parse_reduce_op(reduce_op)

        def reduced(leaf: Any) -> Any:
            return self._reduce_all(op, [(leaf, destinations)], options)[0]

        with self._strategy.cross_replica():
            return map_nest(reduced, value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values at once, each as `reduce_to` does.

        Args:
            reduce_op: `ReduceOp`, or its name in any case.
            value_destination_pairs: Sequence of pairs of a value and its
                destinations, as for `reduce_to`.
            options: `CommunicationOptions`, used as hints.

        Returns:
            List with the result for each pair.

        Raises:
            ValueError: If the operation does not exist, or if shapes differ.
            RuntimeError: If called in replica context.
        """
        context.check_cross_replica(self._strategy, "batch_reduce_to")
        op = parse_reduce_op(reduce_op)
        with self._strategy.cross_replica():
            return self._reduce_all(op, value_destination_pairs, options)

    def _reduce_all(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        executor = self._strategy.executor
        results: dict[int, Any] = {}
        to_combine: dict[int, tuple[Any, Any]] = {}
        for index, (value, to) in enumerate(pairs):
            values = self._strategy.to_combine(op, value)
            if values is not None:
                to_combine[index] = (PerReplica(values), to)
                continue
            plain = self._strategy.plain(value)
            results[index] = spread(plain, devices_at(to, executor), executor)
        combining = list(to_combine.values())
        if len(combining) == 1:
            reduced = [self._ops.reduce(op, *combining[0], options)]
        else:
            reduced = self._ops.batch_reduce(op, combining, options)
        results.update(zip(to_combine, reduced, strict=True))
        return [results[index] for index in range(len(pairs))]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to devices.

        Args:
            tensor: Tensor. A Python number is returned as it is.
            destinations: As for `reduce_to`.

        Returns:
            Tensor on the destination. With several destinations, it is a
            `Mirrored`.

        Raises:
            RuntimeError: If called in replica context.
        """
        context.check_cross_replica(self._strategy, "broadcast_to")
        if isinstance(tensor, (int, float)):
            return tensor
        with self._strategy.cross_replica():
            plain = self._strategy.plain(tensor)
            return self._ops.broadcast(plain, destinations)

    @property
    def _ops(self) -> Any:
        return self._strategy.cross_device_ops or _BY_BACKEND
