"""StrategyExtended: methods of a strategy for libraries and optimizers."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.core.components import VariableComponent
from keras_dist.core.device import Device
from keras_dist.core.nests import map_nest
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import parse_reduce_op
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist.fit.creation import beside
from keras_dist.replica.call import CopyCall
from keras_dist.replica.call import CopyVariable
from keras_dist.replica.call import run_on_copies
from keras_dist.replica.running import join_results
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.replica.variables import CentralVariable
from keras_dist.strategies import reductions
from keras_dist.strategies.cross_device_ops import HierarchicalCopyAllReduce
from keras_dist.strategies.deprecated import MultiStepContext
from keras_dist.strategies.destinations import devices_at
from keras_dist.strategies.destinations import spread

_BY_BACKEND = HierarchicalCopyAllReduce(num_packs=0)


class StrategyExtended:
    """`strategy.extended`: methods of a strategy that few programs need.

    It has the public methods of `tf.distribute.StrategyExtended`, and those of
    its version for TensorFlow 1. What differs:

    - It is no base class for strategies of your own. Make a
      `keras_dist.Strategy` of a `Plan`, with a `Backend` of your own if you
      need one; see `keras_dist.plugins`.
    - `worker_devices_by_replica` of some strategies is absent. Use
      `worker_devices`, or `strategy.plan.replicas` where a replica has several
      logical devices.
    - What only the object of a TPU strategy has is absent. In place of
      `experimental_logical_device`, use
      `strategy.experimental_assign_to_logical_device`. In place of
      `tpu_hardware_feature`, use `keras_dist.tpu.experimental`. In place of
      `num_hosts`, use `strategy.cluster_resolver`.
    - `experimental_enable_get_next_as_optional` is absent. Datasets end as it
      makes them end: with a smaller last batch, on all replicas.

    Args:
        strategy: The `Strategy` that the methods belong to.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     v = keras.Variable(1.0)
    >>> value = keras_dist.PerReplica([1.0, 3.0])
    >>> mean = strategy.extended.reduce_to("MEAN", value, destinations=v)
    >>> _ = strategy.extended.update(v, lambda c, x: c.assign(x), (mean,))
    >>> float(v)
    2.0
    """

    def __init__(self, strategy: StrategyBase) -> None:
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

    def non_slot_devices(self, var_list: object) -> tuple[str, ...]:
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
        owners = tuple(map(str, self._strategy.plan.parameter_devices[:1]))
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
        return reductions.plain(self._strategy.executor, v)

    def value_container(self, value: object) -> Any:
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

    def variable_created_in_scope(self, v: object) -> bool:
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

    def _check_own(self, variable: keras.Variable, method: str) -> None:
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
        self, numpy_input: object, session: object = None
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
        value: object,
        destinations: object,
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

        def reduced(leaf: object) -> Any:
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
        >>> [float(total) for total in sums]
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
            values = reductions.to_combine(self._strategy, op, value)
            if values is not None:
                to_combine[index] = (PerReplica(values), to)
                continue
            plain = reductions.plain(self._strategy.executor, value)
            results[index] = spread(plain, devices_at(to, executor), executor)
        combining = list(to_combine.values())
        if len(combining) == 1:
            reduced = [self._ops.reduce(op, *combining[0], options)]
        else:
            reduced = self._ops.batch_reduce(op, combining, options)
        results.update(zip(to_combine, reduced, strict=True))
        return [results[index] for index in range(len(pairs))]

    def broadcast_to(self, tensor: object, destinations: object) -> Any:
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
            plain = reductions.plain(self._strategy.executor, tensor)
            return self._ops.broadcast(plain, destinations)

    @property
    def _ops(self) -> Any:
        return self._strategy.cross_device_ops or _BY_BACKEND

    def update(
        self,
        var: keras.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn` once for each copy of a variable, on its device.

        `fn` may assign to the copy, and to other variables of the strategy. It
        reads and writes their copies on the same device. After the call, the
        copies of a mirrored variable have to be equal.

        Args:
            var: A variable of the strategy.
            fn: Callable that takes a copy of `var`. With one replica or a
                single copy, it is called once with `var`.
            args: List or tuple of further arguments. Each call gets its own
                component of per-replica values and variables; a single call
                gets the first component. Other arguments are passed as they
                are.
            kwargs: Dict of keyword arguments, treated in the same way.
            group: Boolean. If false, each leaf of the result is a tuple with
                a value for each copy.

        Returns:
            Nest like the result of `fn`, with a `Mirrored` in place of each
            leaf.

        Raises:
            TypeError: If `var` is not a variable.
            ValueError: If `var` does not belong to this strategy.
            ReplicaDivergenceError: If the copies of a mirrored variable would
                differ. Then all variables keep their previous values.
            RuntimeError: If called in replica context.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = keras.Variable(1.0)
        >>> strategy.extended.update(
        ...     v, lambda copy, x: copy.assign_add(x), (2.0,), group=False
        ... )
        (...)
        >>> float(v)
        3.0
        """
        context.check_cross_replica(self._strategy, "update")
        self._check_own(var, "update")
        component = self._component
        if isinstance(var, CentralVariable):
            own_fn = functools.partial(fn, var)
            devices = var.storage.devices
            return self._at_owners(devices, own_fn, args, kwargs, group)

        def update_copy(index: int, call: CopyCall | None) -> Any:
            copy = var if call is None else CopyVariable(var, index, call)
            return fn(
                copy, *component(args, index), **component(kwargs or {}, index)
            )

        plan = self._strategy.plan
        return self._on_copies(update_copy, plan.devices, group)

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn` once on each of the given devices.

        Args:
            colocate_with: Devices of the strategy: the result of
                `non_slot_devices`, or a destination as for `reduce_to`.
            fn: Callable, as for `update`, but without a variable.
            args: List or tuple of arguments, as for `update`.
            kwargs: Dict of keyword arguments, treated in the same way.
            group: Boolean, as for `update`.

        Returns:
            The result of `fn`, as `update` returns it.

        Raises:
            ValueError: If the strategy does not use such a device.
            RuntimeError: If called in replica context.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> extended = strategy.extended
        >>> devices = extended.non_slot_devices([])
        >>> extended.update_non_slot(devices, lambda word: word, ("done",))
        'done'
        """
        context.check_cross_replica(self._strategy, "update_non_slot")
        component = self._component
        plan = self._strategy.plan
        if plan.parameter_devices:
            owners = self._devices_among(
                plan.variable_devices, colocate_with, "keeps no variables"
            )
            return self._at_owners(owners, fn, args, kwargs, group)
        chosen = plan.devices
        if len(chosen) > 1:
            chosen = self._devices_among(
                chosen, colocate_with, "does not compute"
            )
        return self._on_copies(
            lambda index, _: fn(
                *component(args, index), **component(kwargs or {}, index)
            ),
            chosen,
            group,
        )

    def _devices_among(
        self, devices: Sequence[Device], colocate_with: object, refusal: str
    ) -> tuple[Device, ...]:
        asked = devices_at(colocate_with, self._strategy.executor)
        for device in asked:
            if device not in devices:
                raise ValueError(
                    f"{self._strategy!r} {refusal} on '{device}'. Received: "
                    f"colocate_with={colocate_with!r}. Expected: some of "
                    f"{tuple(map(str, devices))}."
                )
        return asked

    def _at_owners(
        self,
        devices: Sequence[Device],
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        group: bool,
    ) -> Any:
        strategy = self._strategy
        with strategy.cross_replica(), strategy.executor.creation_scope():
            results = [
                fn(
                    *self._first(args, device),
                    **self._first(kwargs or {}, device),
                )
                for device in devices
            ]
        return self._grouped(results, group)

    def _first(self, nest: object, device: Device) -> Any:
        """Replaces distributed values by first components, on the device."""

        def first(leaf: object) -> Any:
            if isinstance(leaf, DistributedValues):
                leaf = leaf.values[0]
            if isinstance(leaf, keras.Variable) or not ops.is_tensor(leaf):
                return leaf
            return self._strategy.executor.put(leaf, device)

        return map_nest(first, nest)

    def _on_copies(
        self,
        fn: Callable[[int, CopyCall | None], Any],
        devices: Sequence[Device],
        group: bool,
    ) -> Any:
        strategy = self._strategy
        runner = strategy.executor.replicas
        if runner is None:
            with strategy.cross_replica(), strategy.executor.creation_scope():
                results = [fn(0, None)]
        else:
            chosen = [device in devices for device in strategy.plan.devices]
            with strategy.executor.hooks:
                every = run_on_copies(
                    strategy,
                    runner,
                    lambda i, c: fn(i, c) if chosen[i] else None,
                )
            results = [
                r
                for r, is_chosen in zip(every, chosen, strict=True)
                if is_chosen
            ]
        return self._grouped(results, group)

    def _grouped(self, results: Sequence[Any], group: bool) -> Any:
        grouped = join_results(self._strategy.executor, results, Mirrored)
        if group:
            return grouped
        return map_nest(self._strategy.experimental_local_results, grouped)

    def _component(self, nest: object, index: int) -> Any:
        def component(leaf: object) -> Any:
            if isinstance(leaf, DistributedValues):
                # A variable with a single copy has one component for all.
                return leaf.values[index % len(leaf.values)]
            return self._strategy.executor.bring(leaf, index)

        return map_nest(component, nest)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> MultiStepContext:
        """Calls `fn` with one element after another; deprecated.

        Instead, write a loop that calls `strategy.run`.

        Args:
            fn: Callable that takes a `MultiStepContext` and the next element
                of the iterator. It calls `strategy.run`.
            iterator: An iterator over distributed data.
            iterations: Integer, number of elements, at least 1.
            initial_loop_values: Dict, the `last_step_outputs` before the
                first step, or `None`.

        Returns:
            The `MultiStepContext`, with the outputs of the last step.

        Raises:
            ValueError: If `iterations` is less than 1.
            OutOfRangeError: If there are fewer elements.
            RuntimeError: If called in replica context.
        """
        strategy = self._strategy
        name = "experimental_run_steps_on_iterator"
        context.check_cross_replica(strategy, name)
        if iterations < 1:
            raise ValueError(
                f"`{name}` must run at least one step. Received: "
                f"iterations={iterations}."
            )
        steps = MultiStepContext(strategy, initial_loop_values)
        with strategy.scope():
            for _ in range(iterations):
                fn(steps, iterator.get_next())
        return steps

    @contextlib.contextmanager
    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> Iterator[None]:
        """Returns a context that places new variables with an existing one.

        If each device has a copy of every variable, this only checks the
        argument.

        Args:
            colocate_with_variable: A variable of the strategy.

        Returns:
            A context manager.

        Raises:
            TypeError: If the argument is not a variable.
            RuntimeError: If called outside of the strategy's scope.
            ValueError: If the variable does not belong to the strategy.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = keras.Variable(1.0)
        ...     with strategy.extended.colocate_vars_with(v):
        ...         w = keras.Variable(2.0)
        >>> strategy.devices_of(w) == strategy.devices_of(v)
        True
        """
        if context.current_strategy() is not self._strategy.if_current:
            raise RuntimeError(
                "Need to be inside of the strategy's scope for "
                "`colocate_vars_with`. Received: a call outside of "
                f"`strategy.scope()` of {self._strategy!r}."
            )
        self._check_own(colocate_with_variable, "colocate_vars_with")
        with beside(colocate_with_variable):
            yield
