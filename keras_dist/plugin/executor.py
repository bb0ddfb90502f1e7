"""Executor: the plugin interface that carries out one plan."""

import contextlib
import itertools
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

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import combine
from keras_dist.core.rows import bounds
from keras_dist.core.rows import check_rows
from keras_dist.core.rows import ranges
from keras_dist.core.values import PerReplica
from keras_dist.internals.hooks import Hooks
from keras_dist.plugin.compiler import Compiler
from keras_dist.plugin.front_end import HOOKS
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist.plugin.storage import Storage
from keras_dist.plugin.workers import Workers
from keras_dist.plugin.workers import total_of


class Executor(ABC):
    """The backend's object that carries out one `Plan`.

    Args:
        plan: The `Plan` that the executor is bound to.
        workers: The `Workers` of its cluster, or `None` without one.
    """

    # Compiles functions for the plan; `None` if the framework can't.
    compiler: Compiler | None = None
    # What is replaced as long as the strategy, or what belongs to it, is used:
    # these rows and, in subclasses, more.
    hooks: Hooks = HOOKS
    # True if a variable stays where it is when it is assigned.
    assigns_in_place = False
    # True if a model outside any strategy may train layers that it shares
    # with a distributed model.
    shares_layers = True
    # True if steps of `fit` see all rows, and the framework divides them.
    sees_all_rows = False
    # How many batches `fit` sends to devices before their steps, if the
    # program would wait for the copies otherwise.
    batches_ahead = 1

    def __init__(self, plan: Plan, workers: Workers | None = None) -> None:
        self.plan = plan
        self.workers = workers

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which the strategy's variables are made."""
        return contextlib.nullcontext()

    def left_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which variables are made as Keras makes them.

        It suspends an open `creation_scope`, for models of no strategy.
        """
        return contextlib.nullcontext()

    def execution_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of `fit`, `evaluate` and so on."""
        return contextlib.nullcontext()

    def default_device(self) -> Any:
        """Returns this thread's default device, as the framework names it."""
        return None

    @abstractmethod
    def storage(self, variable: keras.Variable) -> Storage:
        """Returns the place where a variable of the strategy rests."""

    def creating_beside(
        self, reference: keras.Variable | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which a new variable gets its first value.

        Args:
            reference: The `keras.Variable` that an optimizer makes it for, or
                `None`.
        """
        return contextlib.nullcontext()

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        """Notes that a new variable was made for a reference variable.

        An optimizer's slots are, each for a variable that it updates. A new
        variable has no storage yet.
        """

    @property
    def replicas(self) -> ReplicaRunner | None:
        """The runner of several replicas; `None` where there is only one.

        It is the executor itself, if that is a `ReplicaRunner`.
        """
        return self if isinstance(self, ReplicaRunner) else None

    @property
    def num_components(self) -> int:
        """Number of components of a per-replica value: the local replicas.

        In a program that all workers run together, it may be the number of
        all replicas.
        """
        return self.plan.num_local_replicas

    @abstractmethod
    def put(self, value: object, device: Device) -> Any:
        """Returns a value as a tensor on a device.

        Args:
            value: Tensor, NumPy array, number, or nest of numbers. It may
                share memory with the result.
            device: The `Device` of the result.
        """

    def mark_even(self, value: object) -> None:
        """Notes that each replica of all workers has as many rows of a tensor.

        Args:
            value: Tensor on its device, or `None`.
        """

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Makes a `PerReplica`, in the form that suits the framework best."""
        return PerReplica(values)

    def snapshot(self, value: object, index: int = 0) -> Any:
        """Returns a value that later assignments to variables can't change.

        Args:
            value: Any object. A `keras.Variable` is returned as it is.
            index: Integer, the replica that returned the value.
        """
        return value

    def is_live(self, value: object) -> bool:
        """Returns true for a variable's own tensor, which changes with it."""
        return False

    def check_arguments(self, nest: object) -> None:
        """Refuses arguments that no replica function can be called with.

        Raises:
            UnsupportedModelError: If an argument can't be used in replicas.
        """
        return  # AutoGraph can't convert a function without a statement

    def bring(self, value: object, index: int) -> Any:
        """Returns an argument for replica `index`, on its device if needed."""
        return value

    def leave(self, nest: object) -> Any:
        """Converts a replica function's result for use outside the replica."""
        return nest

    def mirror(self, value: object) -> Any:
        """Copies a tensor to where variables are, to combine the two.

        The result shares no memory with `value`, so variables may keep it.
        """
        return self.put(value, self.plan.primary)

    def device_of(self, tensor: object) -> Device:
        """Returns a tensor's device; the primary one if it is not known."""
        return self.plan.primary

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        """Combines tensors of one shape element by element, over all replicas.

        Args:
            op: The `ReduceOp`.
            values: Sequence with each local replica's tensor or number. The
                replicas of other workers are combined too.

        Returns:
            Tensor where variables are.

        Raises:
            ValueError: If shapes differ.
        """
        return self.combine_all(op, [values])[0]

    def combine_all(
        self, op: ReduceOp, values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Combines several values, in as few collectives as possible.

        Args:
            op: The `ReduceOp`.
            values: Sequence with, for each value, the `values` of `combine`.

        Returns:
            List with a tensor for each value, where variables are.
        """
        primary = self.plan.primary
        within = op if self.workers is None else total_of(op)
        combined = [
            combine(within, [self.put(value, primary) for value in components])
            for components in values
        ]
        if self.workers is not None:
            count = self.plan.num_replicas
            combined = self.workers.combine(op, combined, count)
        return [self.mirror(value) for value in combined]

    def combine_whole(self, op: ReduceOp, value: object) -> Any:
        """Reduces a `PerReplica` that the backend stores as one array.

        Args:
            op: The `ReduceOp`.
            value: Any object.

        Returns:
            Tensor where variables are; `None` if the value is not stored as
            one array, so that the caller combines its components.
        """
        return None

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        """Concatenates the tensors of all replicas, on the primary device.

        Args:
            values: Sequence with each local replica's tensor. Sizes may
                differ along `axis` only.
            axis: Integer, not negative.
        """
        here = [self.put(value, self.plan.primary) for value in values]
        local_tensor = ops.concatenate(here, axis=axis)
        if self.workers is None:
            return local_tensor
        return self.workers.concatenate(local_tensor, axis)

    def check_equal(
        self, values: Sequence[Any], error: Callable[[], Exception]
    ) -> None:
        """Raises `error()` unless all replicas' values are equal.

        Floating-point numbers are equal up to a relative difference of 1e-4.

        Args:
            values: Sequence with each local replica's tensor. They are also
                compared with the first replica's tensor of other workers.
            error: Callable that returns the exception.
        """
        everyone = list(values)
        if self.workers is not None:
            tensor = ops.convert_to_tensor(values[0])
            everyone += [
                tensors[0] for tensors in self.workers.gather([tensor])
            ]
        first, *others = [ops.convert_to_numpy(value) for value in everyone]
        for other in others:
            if not _is_equal(first, other):
                raise error()

    def refuse(
        self,
        flags: Sequence[Any],
        error: Callable[[int], Exception],
        values: Sequence[Any] = (),
    ) -> list[Any]:
        """Raises an error for the first flag that is not zero.

        Args:
            flags: Sequence of scalar tensors, the same on all workers.
            error: Callable from a flag's place to the exception.
            values: Sequence of tensors, which must not be used before.

        Returns:
            List of the values, for further use.
        """
        for place, flag in enumerate(flags):
            if float(flag):
                raise error(place)
        return list(values)

    def explained(self, error: BaseException) -> BaseException:
        """Returns the error of `refuse` that a framework's error tells of,
        else the error itself."""
        return error

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        """Returns methods that replace the model's own, on this instance only.

        None by default. The steps of an executor that is a `StepRunner` are
        replaced already.

        Args:
            model: A `keras.Model`, not necessarily built or compiled.

        Returns:
            Dict from attribute name to callable. The model's class keeps the
            originals.
        """
        return {}

    def rows_in_fit(self, batch: object) -> list[range]:
        """Returns the rows of a global batch that each replica gets in `fit`.

        Args:
            batch: Nest of arrays, the global batch.

        Returns:
            List with a range for each replica of all workers. Ranges may be
            equal: a backend may let several replicas compute the same rows
            where splitting would cost more.

        Raises:
            ValueError: If the batch has no rows.
        """
        return ranges(bounds(check_rows(batch), self.plan.num_replicas))

    def own_rows_of(
        self, model: keras.Model
    ) -> Callable[[Any, Any, Any, Any], Any] | None:
        """Returns what makes an array of a batch of which only rows are here.

        Args:
            model: A `keras.Model` whose steps are about to read batches.

        Returns:
            A callable that gets this worker's rows, the place of their first
            in the global batch, the rows of that, and a checksum of it; or
            `None`, if the model's steps read whole batches.
        """
        return None

    def read_from(self, iterator: Any, adapter: Any) -> None:
        """Makes a trainer's iterator read batches of `own_rows_of` arrays.

        Args:
            iterator: Keras' `EpochIterator`.
            adapter: The data adapter that gives such batches.
        """
        iterator.data_adapter = adapter

    # Whether a trainer reads its batches in Python, where they can be seen.
    shows_batches = True

    def watch_first(self, batches: object, see: Callable[[Any], None]) -> Any:
        """Wraps a trainer's batches to show the first one to a function.

        Args:
            batches: The iterable that the trainer reads.
            see: Callable that gets the first batch before the trainer does,
                or `None` if there is no batch.
        """
        return with_first_seen(batches, see)

    def prepare(self, model: keras.Model) -> None:
        """Prepares a model to run; its variables are in place already."""

    def recover(self, model: keras.Model) -> None:
        """Cleans up after a failed `fit`, `evaluate` and so on.

        It is called before the error reaches the user.
        """

    def release(self, model: keras.Model) -> None:
        """Releases resources after `fit`, `evaluate` and so on, even failed."""


def _is_equal(first: np.ndarray, other: np.ndarray) -> bool:
    if first.dtype.kind in "biu":
        return np.array_equal(first, other)
    return np.allclose(first, other, rtol=1e-4, equal_nan=True)


def with_first_seen(batches: Any, see: Callable[[Any], None]) -> Iterator[Any]:
    """Yields all batches, and shows the first, or `None`, to `see`."""
    iterator = iter(batches)
    first = list(itertools.islice(iterator, 1))
    see(first[0] if first else None)
    yield from first
    yield from iterator
