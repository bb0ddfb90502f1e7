"""`strategy.extended` but for updates: devices, variables, reductions."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.core.components import VariableComponent
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
    """Devices, variables, and reductions and broadcasts to devices."""

    def __init__(self, strategy: "DeprecatedMethods") -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Names of this worker's devices that compute, in replica order.

        Returns:
            Tuple of strings, one for each replica. For a replica on several
            logical devices, it is the first of these.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.worker_devices
        ('cpu:0', 'cpu:1')
        """
        return tuple(str(device) for device in self._strategy.plan.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of this worker's devices that hold variables.

        Returns:
            Tuple of strings. The first is the primary device, whose copy is
            saved.

        Example:

        >>> strategy = keras_dist.CentralStorageStrategy(
        ...     ["cpu:0", "cpu:1"], "cpu:0")
        >>> strategy.extended.parameter_devices
        ('cpu:0',)
        """
        plan = self._strategy.plan
        return tuple(str(device) for device in plan.variable_devices)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Returns devices for state that belongs to several variables.

        Args:
            var_list: List of variables. The result does not depend on it.

        Returns:
            Tuple of device names, for `update_non_slot`. If variables have a
            single copy, the tuple has one device.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.non_slot_devices([])
        ('cpu:0', 'cpu:1')
        """
        owners = tuple(map(str, self._strategy.plan.keepers[:1]))
        return owners or self.parameter_devices

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
        """True on the chief, since it initializes variables.

        With one worker, that worker is the chief.
        """
        return self._strategy.plan.is_chief

    @property
    def should_checkpoint(self) -> bool:
        """True on the chief, since it saves checkpoints.

        With one worker, that worker is the chief. `model.save` and the
        callbacks of Keras ask it for you, so call them on every worker.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> if strategy.extended.should_checkpoint:
        ...     print("writes a file")
        writes a file
        """
        return self._strategy.plan.is_chief

    @property
    def should_save_summary(self) -> bool:
        """True on the chief, since it writes logs.

        With one worker, that worker is the chief. For a callback that writes
        logs, `keras_dist.on_chief` is enough.
        """
        return self._strategy.plan.is_chief

    def read_var(self, v: keras.Variable) -> Any:
        """Returns a variable's value in cross-replica context.

        Args:
            v: A variable of the strategy. If replicas keep values of their
                own, these are combined as its `aggregation` says.

        Returns:
            Tensor. Later assignments to the variable don't change it.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = keras.Variable(1.0)
        >>> before = strategy.extended.read_var(v)
        >>> _ = v.assign(2.0)
        >>> float(keras.ops.convert_to_numpy(before))
        1.0
        """
        return self._strategy.plain(v)

    def value_container(self, value: Any) -> Any:
        """Returns the distributed variable that a component belongs to.

        Args:
            value: A component of a variable, or any other object.

        Returns:
            The variable. Any other object is returned as it is.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = keras.Variable(1.0)
        >>> components = strategy.experimental_local_results(v)
        >>> strategy.extended.value_container(components[1]) is v
        True
        """
        if isinstance(value, VariableComponent):
            return value.container
        return value

    def variable_created_in_scope(self, v: Any) -> bool:
        """Returns whether a variable belongs to this strategy.

        Args:
            v: A `keras.Variable`, or any other object.

        Returns:
            Boolean. It is true for a variable that was made in the strategy's
            scope, and false for an object that is no variable.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.variable_created_in_scope(keras.Variable(1.0))
        False
        """
        if not isinstance(v, keras.Variable):
            return False
        return vars(v).get("distribute_strategy") is self._strategy.if_current

    def _check_own(self, variable: Any, method: str) -> None:
        if not isinstance(variable, keras.Variable):
            raise TypeError(
                f"`{method}` needs a variable, made under the strategy's "
                f"scope. Received: {variable!r} of type "
                f"{type(variable).__name__}. Expected: a `keras.Variable`."
            )
        if not self.variable_created_in_scope(variable):
            raise ValueError(
                f"`{method}` needs a variable that was created in this "
                f"strategy's scope. Received: variable '{variable.path}', "
                f"which does not belong to {self._strategy!r}."
            )

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `strategy.run`; this is its old name.

        Args:
            fn: Callable, as for `strategy.run`.
            args: List or tuple of its positional arguments.
            kwargs: Dict of its keyword arguments.

        Returns:
            What `strategy.run` returns. It raises the same errors too.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.call_for_each_replica(lambda x: x, ("a",))
        'a'
        """
        return self._strategy.run(fn, args=args, kwargs=kwargs)

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Any:
        """Calls `strategy.experimental_make_numpy_dataset`.

        Args:
            numpy_input: Nest of NumPy arrays with the same number of rows.
            session: Ignored; programs for TensorFlow 1 pass it.

        Returns:
            The dataset that the strategy's method returns.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> extended = strategy.extended
        >>> rows = extended.experimental_make_numpy_dataset(np.arange(4))
        """
        return self._strategy.experimental_make_numpy_dataset(
            numpy_input, session
        )

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

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = keras_dist.PerReplica([1.0, 3.0])
        >>> total = strategy.extended.reduce_to("SUM", value, "cpu:0")
        >>> float(total)
        4.0
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

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> one = keras_dist.PerReplica([1.0, 3.0])
        >>> two = keras_dist.PerReplica([5.0, 6.0])
        >>> sums = strategy.extended.batch_reduce_to(
        ...     "SUM", [(one, "cpu:0"), (two, "cpu:1")])
        >>> [float(each) for each in sums]
        [4.0, 11.0]
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

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.broadcast_to(7, ["cpu:0", "cpu:1"])
        7
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
