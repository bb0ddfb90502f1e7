"""Executor: what carries out one plan with one framework."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core.components import Component
from keras_dist.core.components import HeldComponent
from keras_dist.core.device import Device
from keras_dist.core.leaves import check_rows
from keras_dist.core.owners import Owners
from keras_dist.core.owners import num_bytes
from keras_dist.core.plan import Plan
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import combine
from keras_dist.core.rows import bounds
from keras_dist.core.rows import ranges
from keras_dist.core.values import PerReplica
from keras_dist.plugin.compilation import Compiler
from keras_dist.plugin.replica import ReplicaRunner
from keras_dist.plugin.workers import Workers
from keras_dist.plugin.workers import total_of


class Executor(ABC):
    """Carries out one `Plan` with one framework.

    Args:
        plan: The `Plan` it is bound to.
        workers: The `Workers` of its cluster, or `None` without one.

    Attributes:
        owners: The `Owners` of variables that have one copy only.
    """

    # What compiles functions for the plan, where the framework can.
    compiler: Compiler | None = None
    # Whether a model of no strategy can train layers that the plan's models
    # have too.
    shares_layers = True

    def __init__(self, plan: Plan, workers: Workers | None = None) -> None:
        self.plan = plan
        self.workers = workers
        self.owners = Owners(plan.variable_devices)

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Entered wherever variables are made under the strategy."""
        return contextlib.nullcontext()

    def execution_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around `fit` and its relatives on a distributed model."""
        return contextlib.nullcontext()

    def default_device(self) -> Any:
        """What the framework calls this thread's default device."""
        return None

    @abstractmethod
    def place(self, variable: keras.Variable) -> None:
        """Puts a variable's value where the plan says; idempotent and cheap.

        A variable with no value yet is left alone.
        """

    @abstractmethod
    def devices_of(self, variable: keras.Variable) -> tuple[Device, ...]:
        """The devices that hold a copy of the variable, primary first."""

    def bytes_on(self, variable: keras.Variable) -> dict[Device, int]:
        """What each device keeps of a variable between steps, in bytes.

        Args:
            variable: A `keras.Variable` of the strategy.

        Returns:
            Dict of the devices that keep any of it, primary first. Replicas'
            own values, of a variable that is combined when it is read, are
            beside the one that it has.
        """
        whole = num_bytes(variable)
        kept = dict.fromkeys(self.devices_of(variable), whole)
        strategy = vars(variable).get("distribute_strategy")
        if strategy is not None and id(variable) in strategy.has_components:
            for device in self.plan.devices:
                kept[device] = kept.get(device, 0) + whole
        return kept

    @property
    def replicas(self) -> ReplicaRunner | None:
        """What runs several replicas; `None` where there is only one."""
        return None

    @property
    def num_components(self) -> int:
        """Components of a per-replica value: those of the local replicas.

        A program that all workers run together may have those of all.
        """
        return self.plan.num_local_replicas

    @abstractmethod
    def put(self, value: Any, device: Device) -> Any:
        """A tensor on a device.

        Args:
            value: Tensor, NumPy array, number, or nest of numbers. It may
                share memory with the result.
            device: `Device`.
        """

    def per_replica(self, values: Sequence[Any]) -> Any:
        """A `PerReplica` of components, as the framework knows it best."""
        return PerReplica(values)

    def snapshot(self, value: Any, index: int = 0) -> Any:
        """A result as it is now, whatever is assigned to variables later.

        Args:
            value: Anything. A `keras.Variable` stays what it is.
            index: Integer, the replica whose result it is.
        """
        return value

    def is_live(self, value: Any) -> bool:
        """Whether a tensor is what a variable keeps, and changes with it."""
        return False

    def check_arguments(self, nest: Any) -> None:
        """Refuses arguments that no replica function can be called with.

        Raises:
            UnsupportedModelError: If there is one.
        """
        return  # TensorFlow can't convert a function of nothing

    def bring(self, value: Any, index: int) -> Any:
        """An argument as replica `index` can use it, moved if need be."""
        return value

    def leave(self, nest: Any) -> Any:
        """What a replica function returned, as it can leave its replica."""
        return nest

    def mirror(self, value: Any) -> Any:
        """A tensor where variables are, so that the two can be combined.

        Variables may keep it: it shares no memory with `value`.
        """
        return self.put(value, self.plan.primary)

    def device_of(self, tensor: Any) -> Device:
        """Where a tensor is; the primary device where that is not known."""
        return self.plan.primary

    @abstractmethod
    def copy_of(self, variable: keras.Variable, index: int) -> Any:
        """The copy of a mirrored variable that replica `index` reads."""

    def component(
        self, variable: keras.Variable, index: int, value: Callable[[], Any]
    ) -> Component:
        """Makes room for a replica's own value of a variable.

        Args:
            variable: A `keras.Variable`.
            index: Integer, the replica's.
            value: Callable that gives the value it starts with.
        """
        return HeldComponent(value())

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        """Combines tensors of one shape element by element, of all workers.

        Args:
            op: `ReduceOp`.
            values: Sequence with each local replica's tensor or number.

        Returns:
            Tensor where variables are.

        Raises:
            ValueError: If shapes differ.
        """
        here = [self.put(value, self.plan.primary) for value in values]
        if self.workers is None:
            return self.mirror(combine(op, here))
        own = combine(total_of(op), here)
        count = self.plan.num_replicas
        return self.mirror(self.workers.combine(op, own, count))

    def combine_all(
        self, op: ReduceOp, values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """`combine` of several values, in as few collectives as can be.

        Args:
            op: `ReduceOp`.
            values: Sequence with, for each value, what `combine` takes.
        """
        if self.workers is None or op not in (ReduceOp.SUM, ReduceOp.MEAN):
            return [self.combine(op, each) for each in values]
        own = [
            combine(
                ReduceOp.SUM, [self.put(v, self.plan.primary) for v in each]
            )
            for each in values
        ]
        totals = self.workers.sum(own)
        if op is ReduceOp.MEAN:
            count = self.plan.num_replicas
            totals = [ops.true_divide(total, count) for total in totals]
        return [self.mirror(total) for total in totals]

    def combine_whole(self, op: ReduceOp, value: Any) -> Any:
        """`combine`, of a per-replica value that is one thing to the framework.

        Args:
            op: `ReduceOp`.
            value: Anything.

        Returns:
            Tensor where variables are; `None` for any other value.
        """
        return None

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        """Joins tensors of all replicas, on the primary device.

        Args:
            values: Sequence of each local replica's, which fit together.
            axis: Integer, not negative.
        """
        here = [self.put(value, self.plan.primary) for value in values]
        own = ops.concatenate(here, axis=axis)
        if self.workers is None:
            return own
        return self.workers.concatenate(own, axis)

    def check_equal(
        self, values: Sequence[Any], error: Callable[[], Exception]
    ) -> None:
        """Raises `error()` unless all values are equal, up to rounding.

        Args:
            values: Sequence of each local replica's tensor. Those of other
                workers are looked at too.
            error: Callable that makes the exception.
        """
        everyone = list(values)
        if self.workers is not None:
            tensor = ops.convert_to_tensor(values[0])
            everyone += [each[0] for each in self.workers.gather([tensor])]
        first, *others = [ops.convert_to_numpy(value) for value in everyone]
        for other in others:
            if not np.allclose(first, other, rtol=1e-4, equal_nan=True):
                raise error()

    @abstractmethod
    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        """Methods that replace the model's own, on this instance only.

        Args:
            model: A `keras.Model`, not necessarily built or compiled.

        Returns:
            Dict from attribute name to callable. The class still holds the
            originals.
        """

    def rows_in_fit(self, batch: Any) -> list[range]:
        """The rows of a global batch that each replica computes in `fit`.

        Args:
            batch: Nest of arrays.

        Returns:
            List with a range for each replica of all workers. Those of two
            replicas may be the same rows, where sharing would cost more.

        Raises:
            ValueError: If it has no rows.
        """
        return ranges(bounds(check_rows(batch), self.plan.num_replicas))

    def watch_first(self, batches: Any, see: Callable[[Any], None]) -> Any:
        """Batches as a trainer reads them, of which the first is looked at.

        Args:
            batches: What the trainer iterates over.
            see: Callable that takes the first batch before it is used, or
                `None` if there is none.
        """
        return _with_first_seen(batches, see)

    def prepare(self, model: keras.Model) -> None:
        """Called before the model runs, with its variables in place."""

    def recover(self, model: keras.Model) -> None:
        """Called when `fit` or a relative failed, before the error leaves."""

    def release(self, model: keras.Model) -> None:
        """Called when `fit` or a relative is over, however it ended."""


def _with_first_seen(batches: Any, see: Callable[[Any], None]) -> Iterator[Any]:
    """Yields all batches, and passes the first to `see` before it is used.

    `see` gets `None` if there are no batches.
    """
    iterator = iter(batches)
    first = list(_one(iterator))
    see(first[0] if first else None)
    yield from first
    yield from iterator


def _one(iterator: Iterator[Any]) -> Iterator[Any]:
    for each in iterator:
        yield each
        return
