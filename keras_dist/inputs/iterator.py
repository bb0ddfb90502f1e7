"""Iterators over distributed data, which put it on the replicas' devices."""

from collections import deque
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import final

import keras
import numpy as np

from keras_dist.core import context
from keras_dist.core.device import Device
from keras_dist.core.nests import always
from keras_dist.core.nests import map_nest
from keras_dist.core.nests import named_leaves
from keras_dist.core.nests import regroup
from keras_dist.core.options import InputOptions
from keras_dist.core.rows import describe
from keras_dist.errors import OutOfRangeError
from keras_dist.inputs.feeds import EvenStep
from keras_dist.inputs.sources.source import dtype_name
from keras_dist.inputs.sources.source import like
from keras_dist.inputs.sources.source import own_memory
from keras_dist.internals import keras_internals
from keras_dist.plugin.executor import Executor
from keras_dist.replica.strategy_core import StrategyBase

HOST = Device("cpu", 0)


class OptionalElement:
    """An element of distributed data, or the end of the data."""

    def __init__(self, elements: list[Any], spec: Callable[[], Any]) -> None:
        self._elements = elements
        self._spec = spec

    def has_value(self) -> bool:
        """Returns true if there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
            ValueError: At the end of the data.
        """
        if not self._elements:
            raise ValueError(
                "The optional has no value: the data is at its end. Call "
                "`has_value()` first."
            )
        return self._elements[0]

    @property
    def element_spec(self) -> Any:
        """The element's spec, like `DistributedDataset.element_spec`."""
        return self._spec()


@final
class DistributedIterator:
    """One pass over a `DistributedDataset`.

    `iter(distributed_dataset)` creates it. It reads on the host, in the thread
    that requests elements. It sends `experimental_per_replica_buffer_size`
    steps ahead to the devices. If reading an element fails, the error is raised
    when that element is requested.

    Args:
        steps: Iterator over lists of each replica's part.
        place: Callable that puts such a list on the devices.
        ahead: Integer, number of steps to read ahead.
        spec: Callable that returns the elements' spec.
        strategy: The `Strategy` of the replicas.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> data = strategy.experimental_distribute_dataset(
    ...     [keras.ops.arange(4.0), keras.ops.arange(1.0)]
    ... )
    >>> iterator = iter(data)
    >>> [part.shape[0] for part in next(iterator).values]
    [2, 2]
    >>> iterator.get_next_as_optional().has_value()
    True
    >>> iterator.get_next_as_optional().has_value()
    False
    """

    def __init__(
        self,
        steps: Iterator[list[Any]],
        place: Callable[[list[Any]], Any],
        ahead: int,
        spec: Callable[[], Any],
        strategy: StrategyBase | None = None,
    ) -> None:
        self.strategy = strategy
        self._steps = steps
        self._place = place
        self._ahead = ahead
        self._spec = spec
        self._read: deque[tuple[Any, Exception | None]] = deque()
        self._is_at_end = False

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> Any:
        """Returns the next element, a nest of `PerReplica` values.

        With one replica, the element is a nest of tensors.

        Raises:
            StopIteration: At the end of the data.
            ValueError: If called in a replica function.
            NotImplementedError: If called inside of a `tf.function`.
        """
        check_place("next(iterator)")
        # Read before an element is taken out, so that an interrupt loses none.
        self._read_ahead()
        if not self._read:
            raise StopIteration
        element, error = self._read.popleft()
        if error is not None:
            raise error
        return element

    def get_next(self) -> Any:
        """Returns the next element, like `next(iterator)`.

        Raises:
            OutOfRangeError: At the end of the data. It is also a
                `StopIteration`.
            ValueError: If called in a replica function.
        """
        optional = self.get_next_as_optional()
        if not optional.has_value():
            raise OutOfRangeError(
                "End of the data: there is no next element. Loop with `for`, "
                "ask `get_next_as_optional`, or make a new iterator."
            )
        return optional.get_value()

    def get_next_as_optional(self) -> OptionalElement:
        """Returns the next element, or an object that marks the end.

        Returns:
            An object with `has_value()` and `get_value()`.
        """
        try:
            return OptionalElement([next(self)], self._spec)
        except StopIteration:
            return OptionalElement([], self._spec)

    def peek(self) -> OptionalElement:
        """Returns the next element without taking it out.

        Returns:
            An object with `has_value()` and `get_value()`.

        Raises:
            ValueError: If called in a replica function.
            NotImplementedError: If called inside of a `tf.function`.
        """
        check_place("iterator.peek()")
        self._read_ahead()
        if not self._read:
            return OptionalElement([], self._spec)
        element, error = self._read[0]
        if error is not None:
            raise error
        return OptionalElement([element], self._spec)

    @property
    def element_spec(self) -> Any:
        """The spec of the elements, like `DistributedDataset.element_spec`."""
        return self._spec()

    @property
    def is_over(self) -> bool:
        """True once all elements have been taken."""
        return self._is_at_end and not self._read

    def _read_ahead(self) -> None:
        while not self._is_at_end and len(self._read) <= self._ahead:
            if self._read and self._read[-1][1] is not None:
                return
            try:
                self._read.append((self._place(next(self._steps)), None))
            except StopIteration:
                self._is_at_end = True
            except Exception as error:
                self._read.append((None, error))


def check_place(what: str) -> None:
    """Raises an error if each replica, or a trace, would read data."""
    if context.in_replica_function():
        raise ValueError(
            f"{what} should be called from outside of replica_fn. Call it "
            "before and pass the element to the replicas: "
            "`strategy.run(replica_fn, args=(next(iterator),))`."
        )
    if keras_internals.in_tf_graph():
        raise NotImplementedError(
            f"{what} was called inside of a `tf.function`, where one batch "
            "would become a constant of the graph. Expected: a loop outside "
            "of the `tf.function` that passes each element to a compiled "
            "step."
        )


class BatchPlacement:
    """A callable that puts each replica's part on the device of the options."""

    def __init__(self, executor: Executor, options: InputOptions) -> None:
        self._executor = executor
        is_on_devices = (
            options.experimental_fetch_to_device
            or options.experimental_place_dataset_on_device
        )
        devices = executor.plan.devices
        self._devices = devices if is_on_devices else (HOST,) * len(devices)

    def __call__(self, parts: Sequence[Any]) -> Any:
        """Joins the replicas' nests to a nest of `PerReplica` values."""
        placed = [
            self._part(part, device)
            for part, device in zip(parts, self._devices, strict=True)
        ]
        if isinstance(parts, EvenStep):
            map_nest(self._executor.mark_even, placed)
        return regroup(placed, self._per_replica, always=always)

    def spec(self, part_spec: object) -> Any:
        """Returns the spec of placed elements, from that of one part."""
        specs = [map_nest(self._delivered, part_spec)] * len(self._devices)
        return regroup(specs, self._per_replica, always=always)

    def _part(self, part: object, device: Device) -> Any:
        def put(leaf: object) -> Any:
            if leaf is None:
                return None
            # A copy, because data may reuse the array's memory while steps
            # are read ahead.
            try:
                return self._executor.put(own_memory(leaf), device)
            except (TypeError, ValueError) as error:
                where = next(p for p, x in named_leaves(part) if x is leaf)
                raise ValueError(
                    f"Data can't be put on device '{device}'. Received: "
                    f"{describe(where, leaf)}. Expected: a dtype that the "
                    f"backend '{keras.backend.backend()}' has."
                ) from error

        return map_nest(put, part)

    def _delivered(self, leaf: object) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        return like(leaf, leaf.shape, self._dtype(leaf.dtype))

    def _dtype(self, name: str) -> str:
        """Returns the backend's dtype for a dtype; not all have 64 bits."""
        try:
            sample = np.zeros((0,), name)
        except TypeError:
            return name  # such as string, which is no NumPy dtype
        return dtype_name(self._executor.put(sample, HOST).dtype)

    def _per_replica(self, parts: Sequence[Any]) -> Any:
        if all(part is None for part in parts):
            return None
        return self._executor.per_replica(parts)
