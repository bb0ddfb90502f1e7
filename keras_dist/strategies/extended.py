"""StrategyExtended: what libraries and optimizers ask of a strategy."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import final

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.core.components import VariableComponent
from keras_dist.core.device import Device
from keras_dist.core.regroup import map_nest
from keras_dist.core.values import DistributedValues
from keras_dist.core.values import Mirrored
from keras_dist.fit import hooks
from keras_dist.fit.creation import beside
from keras_dist.replica.copies import CopyCall
from keras_dist.replica.copies import CopyVariable
from keras_dist.replica.copies import run_on_copies
from keras_dist.replica.multi_step import MultiStepContext
from keras_dist.replica.variables import CentralVariable
from keras_dist.strategies.destinations import devices_at
from keras_dist.strategies.extended_reductions import ExtendedReductions


class StrategyExtended(ExtendedReductions):
    """Methods of a strategy that few programs need; `strategy.extended`.

    Args:
        strategy: The `Strategy`.

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

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Names of the devices that compute, in replica order."""
        return tuple(str(device) for device in self._strategy.plan.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of the devices that hold variables, primary first."""
        plan = self._strategy.plan
        return tuple(str(device) for device in plan.variable_devices)

    def update(
        self,
        var: keras.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn` once for each copy of a variable, on its device.

        A variable that has one copy for all replicas is given as it is, once.
        `fn` may assign to the copy, and to other variables of the strategy,
        of which it reads and writes the copies beside that one. The copies of
        a mirrored variable have to be equal in the end.

        Args:
            var: A variable of the strategy.
            fn: Callable, given a copy of it. With one replica, the variable.
            args: List or tuple of further arguments. Each call gets its own
                component of per-replica values and variables (the first one
                if there is only one call), and anything else as it is.
            kwargs: Dict of keyword arguments, likewise.
            group: Boolean. If not, what `fn` returned for each copy is in a
                tuple.

        Returns:
            What `fn` returned, with a `Mirrored` in place of each leaf.

        Raises:
            TypeError: If `var` is no variable.
            ValueError: If it is not one of this strategy.
            ReplicaDivergenceError: If the copies of a mirrored variable would
                differ. All variables are as before then.
            RuntimeError: In replica context.

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
            owner = self._strategy.executor.owners.of(var)
            own_fn = functools.partial(fn, var)
            return self._at_owners([owner], own_fn, args, kwargs, group)

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
        """Calls `fn` once on each of some devices.

        Args:
            colocate_with: What `non_slot_devices` returned, or a destination
                as for `reduce_to`. Devices of the strategy.
            fn: Callable. As for `update`, but it is given no variable.
            args: List or tuple of arguments, as for `update`.
            kwargs: Dict of keyword arguments, likewise.
            group: Boolean, as for `update`.

        Returns:
            As `update`.

        Raises:
            ValueError: If the strategy does not compute on such a device.
            RuntimeError: In replica context.
        """
        context.check_cross_replica(self._strategy, "update_non_slot")
        own = self._component
        if self._strategy.plan.is_central:
            owners = self._keeping_devices(colocate_with)
            return self._at_owners(owners, fn, args, kwargs, group)
        return self._on_copies(
            lambda index, _: fn(*own(args, index), **own(kwargs or {}, index)),
            self._computing_devices(colocate_with),
            group,
        )

    def _computing_devices(self, colocate_with: Any) -> tuple[Device, ...]:
        devices = self._strategy.plan.devices
        if len(devices) == 1:
            return devices
        asked = devices_at(colocate_with, self._strategy.executor)
        for device in asked:
            if device not in devices:
                raise ValueError(
                    f"{self._strategy!r} does not compute on '{device}'. "
                    f"Received: colocate_with={colocate_with!r}. Expected: of "
                    f"{self.worker_devices}."
                )
        return asked

    def _keeping_devices(self, colocate_with: Any) -> tuple[Device, ...]:
        asked = devices_at(colocate_with, self._strategy.executor)
        for device in asked:
            if device not in self._strategy.plan.variable_devices:
                raise ValueError(
                    f"{self._strategy!r} keeps no variables on '{device}'. "
                    f"Received: colocate_with={colocate_with!r}. Expected: of "
                    f"{self.parameter_devices}."
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
        """What a function gets that is called once, instead of on replicas."""

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
            hooks.install()
            chosen = [device in devices for device in strategy.plan.devices]
            every = run_on_copies(
                strategy, runner, lambda i, c: fn(i, c) if chosen[i] else None
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
                # A variable with one copy has that for every replica.
                return leaf.values[index % len(leaf.values)]
            return self._strategy.executor.bring(leaf, index)

        return map_nest(own, nest)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Devices for state that belongs to several variables.

        Args:
            var_list: List of variables. (All variables have the same.)

        Returns:
            Tuple of names of devices, for `update_non_slot`. Where variables
            have one copy, that is one device.
        """
        if self._strategy.plan.is_central:
            return self.parameter_devices[:1]
        return self.parameter_devices

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The old name of `strategy.run`."""
        return self._strategy.run(fn, args=args, kwargs=kwargs)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> MultiStepContext:
        """Deprecated: calls `fn` with one element after another.

        Write the loop yourself, with `strategy.run` in it.

        Args:
            fn: Callable, given a `MultiStepContext` and what the iterator's
                `get_next()` returned. It calls `strategy.run`.
            iterator: An iterator over distributed data.
            iterations: Integer, how often, at least 1.
            initial_loop_values: Dict of outputs from before the first step,
                or `None`.

        Returns:
            The `MultiStepContext`, with what the last step has set.

        Raises:
            ValueError: If `iterations` is less than 1.
            OutOfRangeError: If there are fewer elements.
            RuntimeError: In replica context.
        """
        strategy = self._strategy
        name = "experimental_run_steps_on_iterator"
        context.check_cross_replica(strategy, name)
        if iterations < 1:
            raise ValueError(
                f"`{name}` runs at least one step. Received: "
                f"iterations={iterations}."
            )
        steps = MultiStepContext(strategy, initial_loop_values)
        with strategy.scope():
            for _ in range(iterations):
                fn(steps, iterator.get_next())
        return steps

    def read_var(self, v: keras.Variable) -> Any:
        """A variable's value in cross-replica context.

        Returns:
            Tensor, which stays as it is when the variable is assigned to.
        """
        return self._strategy.plain(v)

    def value_container(self, value: Any) -> Any:
        """The distributed variable that a component is of.

        Args:
            value: A component of a variable, or anything else.

        Returns:
            The variable; anything else is returned as it is.
        """
        if isinstance(value, VariableComponent):
            return value.container
        return value

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable belongs to this strategy."""
        if not isinstance(v, keras.Variable):
            return False
        return vars(v).get("distribute_strategy") is self._strategy.if_current

    @contextlib.contextmanager
    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> Iterator[None]:
        """Variables made inside are on the devices of another one.

        Where each has a copy on all devices they are anyway: this checks that
        the other one is the strategy's.

        Args:
            colocate_with_variable: A variable of the strategy.

        Raises:
            RuntimeError: Outside of the strategy's scope.
            ValueError: If the variable is not the strategy's.
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

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Any:
        """As `strategy.experimental_make_numpy_dataset`."""
        return self._strategy.experimental_make_numpy_dataset(
            numpy_input, session
        )

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether replica functions need shapes that never change: no."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker runs the program: yes, if there are several."""
        return self._strategy.plan.cluster is not None

    @property
    def experimental_should_init(self) -> bool:
        """Whether this worker initializes variables: the chief does."""
        return self._strategy.plan.is_chief

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker saves: the chief does."""
        return self._strategy.plan.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker writes logs: the chief does."""
        return self._strategy.plan.is_chief


@final
class DefaultExtended(StrategyExtended):
    """That of the default strategy, which knows no devices."""

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Unknown to plain Keras."""
        raise self._unsupported("worker_devices")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Unknown to plain Keras."""
        raise self._unsupported("parameter_devices")

    def read_var(self, v: keras.Variable) -> Any:
        """A variable's value, a tensor that stays as it is."""
        return ops.copy(v.value)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Unknown to plain Keras: none."""
        return ()

    def _unsupported(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"{name}() method unsupported by default strategy: Keras chooses "
            "the device. Use a `keras_dist.OneDeviceStrategy` to choose it "
            "yourself."
        )
