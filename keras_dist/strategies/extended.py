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
from keras_dist.core.device import Device
from keras_dist.core.nests import map_nest
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.fit.creation import beside
from keras_dist.replica.call import CopyCall
from keras_dist.replica.call import CopyVariable
from keras_dist.replica.call import run_on_copies
from keras_dist.replica.variables import CentralVariable
from keras_dist.strategies.deprecated import MultiStepContext
from keras_dist.strategies.destinations import devices_at
from keras_dist.strategies.extended_base import ExtendedBase


class StrategyExtended(ExtendedBase):
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
        own = self._component
        if isinstance(var, CentralVariable):
            own_fn = functools.partial(fn, var)
            devices = var.home.devices
            return self._at_owners(devices, own_fn, args, kwargs, group)

        def update_copy(index: int, call: CopyCall | None) -> Any:
            copy = var if call is None else CopyVariable(var, index, call)
            return fn(copy, *own(args, index), **own(kwargs or {}, index))

        plan = self._strategy.plan
        return self._on_copies(update_copy, plan.devices, group)

    def update_non_slot(
        self,
        colocate_with: Any,
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
        own = self._component
        plan = self._strategy.plan
        if plan.keepers:
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
            lambda index, _: fn(*own(args, index), **own(kwargs or {}, index)),
            chosen,
            group,
        )

    def _devices_among(
        self, devices: Sequence[Device], colocate_with: Any, refusal: str
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

    def _first(self, nest: Any, device: Device) -> Any:
        """Replaces distributed values by first components, on the device."""

        def first(leaf: Any) -> Any:
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
            results = [r for r, own in zip(every, chosen, strict=True) if own]
        return self._grouped(results, group)

    def _grouped(self, results: Sequence[Any], group: bool) -> Any:
        grouped = self._strategy.joined_results(results, Mirrored)
        if group:
            return grouped
        return map_nest(self._strategy.experimental_local_results, grouped)

    def _component(self, nest: Any, index: int) -> Any:
        def own(leaf: Any) -> Any:
            if isinstance(leaf, DistributedValues):
                # A variable with a single copy has one component for all.
                return leaf.values[index % len(leaf.values)]
            return self._strategy.executor.bring(leaf, index)

        return map_nest(own, nest)

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
