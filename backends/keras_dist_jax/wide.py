"""The layout of several workers: one program over the devices of all.

Between programs each worker has arrays of its own only, so that everything
else is as it is on one worker.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import SingleDeviceSharding

from keras_dist_jax import arrays
from keras_dist_jax.layout import MeshLayout
from keras_dist_jax.layout import Shapes


class WideLayout(MeshLayout):
    """State on each device of each worker, with batches cut over all of them.

    Args:
        devices: Sequence with, for each worker, the `jax.Device`s of its
            replicas; all of one platform.
        worker: Integer, the position of this worker.
        exchange: Callable from a list of integers, as many on each worker, to
            the lists of all workers.
        gather: Callable from a list of tensors, of the same shapes on each
            worker, to the lists of all workers.
    """

    is_wide = True

    def __init__(
        self,
        devices: Sequence[Sequence[Any]],
        worker: int,
        exchange: Callable[[list[int]], list[list[int]]],
        gather: Callable[[list[Any]], list[list[Any]]],
    ) -> None:
        own = devices[worker]
        super().__init__(own)
        if len(own) == 1:
            self.sharding = SingleDeviceSharding(own[0])
        mesh = Mesh(
            np.array(devices).ravel(),
            ("replica",),
            axis_types=(AxisType.Auto,),
        )
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.cut = NamedSharding(mesh, PartitionSpec("replica"))
        self.num_replicas = len(devices) * len(own)
        self.first = worker * len(own)
        self._num_workers = len(devices)
        self._exchange = exchange
        self._gather = gather

    def holds(self, array: Any) -> bool:
        return super().holds(array) and array.committed

    def widen(self, array: Any) -> Any:
        if not array.is_fully_addressable:
            return array
        shards = {s.device: s.data for s in array.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            array.shape, self.whole, [shards[d] for d in self.devices]
        )

    def narrow(self, array: Any) -> Any:
        # Arrays that are cut over the workers stay as they are.
        if _is_local(array) or not array.is_fully_replicated:
            return array
        shards = {s.device: s.data for s in array.addressable_shards}
        own = [shards[device] for device in self.devices]
        if len(own) == 1:
            return own[0]
        return jax.make_array_from_single_device_arrays(
            array.shape, self.sharding, own
        )

    def result(self, array: Any) -> Any:
        if _is_local(array) or not array.is_fully_replicated:
            return array
        return array.addressable_data(0)

    def on_host(self, array: Any) -> np.ndarray[Any, Any]:
        found = self._gather([arrays.own_part(array)])
        parts = [np.asarray(own) for (own,) in found]
        return np.concatenate(parts, arrays.axis_of(array))

    def everyones(self, shapes: Sequence[Shapes]) -> list[Shapes]:
        numbers = [n for value in shapes for shape in value for n in shape]
        if not numbers:
            return [value * self._num_workers for value in shapes]
        found = self._exchange(numbers)
        everyones: list[Shapes] = [() for _ in shapes]
        for own in found:
            rest = iter(own)
            for index, value in enumerate(shapes):
                everyones[index] += tuple(
                    tuple(next(rest) for _ in shape) for shape in value
                )
        return everyones


def _is_local(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable
