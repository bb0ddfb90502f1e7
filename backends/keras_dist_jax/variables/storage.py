"""The storage of variables, and moves to where a layout needs them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_dist.plugins import Device
from keras_dist.plugins import Plan
from keras_dist.plugins import ShardedStorage
from keras_dist.plugins import Storage
from keras_dist.plugins import num_bytes
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.placement import arrays
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.sharding import sharded_steps
from keras_dist_jax.sharding import shards


class JaxStorage(Storage):
    """The storage of a variable with a copy on each of a layout's devices."""

    def __init__(
        self, variable: keras.Variable, plan: Plan, layout: Layout
    ) -> None:
        super().__init__(variable)
        self._plan = plan
        self._layout = layout

    @property
    def devices(self) -> tuple[Device, ...]:
        array = internals.array_of(self.variable)
        if array is None:
            return self._plan.variable_devices
        holders = array.sharding.device_set
        return tuple(
            device
            for device, jax_device in zip(
                self._plan.all_devices, self._layout.holders, strict=True
            )
            if jax_device in holders
        )

    def place(self) -> None:
        place(self.variable, self._layout)

    def read(self, index: int) -> Any:
        return read_aliased(self.variable, self._layout.devices[index])


class CentralStorage(Storage):
    """The storage of a single copy, which `readers` get copies of."""

    kind = "central"

    def __init__(
        self,
        variable: keras.Variable,
        parameter_device: Device,
        layout: Layout,
        readers: Sequence[Any],
    ) -> None:
        super().__init__(variable)
        self._device = parameter_device
        self._layout = layout
        self._readers = readers

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self._device,)

    def place(self) -> None:
        place(self.variable, self._layout)

    def read(self, index: int) -> Any:
        return read_aliased(self.variable, self._readers[index])


class JaxShardedStorage(JaxStorage, ShardedStorage):
    """The storage of a variable that is sharded as `division` says."""

    def __init__(
        self,
        variable: keras.Variable,
        plan: Plan,
        layout: Layout,
        division: shards.Shards,
    ) -> None:
        super().__init__(variable, plan, layout)
        self._division = division

    @property
    def is_split(self) -> bool:
        return shards.is_sharded(self.variable)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._plan.variable_devices

    def bytes_kept(self) -> dict[Device, int]:
        if not self.is_split:
            return super().bytes_kept()
        part = math.prod(shards.shards_of(self.variable).shard_shape)
        size = math.prod(self.variable.shape)
        kept = part * num_bytes(self.variable) // size
        return dict.fromkeys(self.devices, kept)

    def place(self) -> None:
        shards.split(self.variable, self._division)
        super().place()

    def used(self, value: object) -> Any:
        return sharded_steps.used(self.variable, value)

    def on_host(self) -> Any:
        return shards.host_value_of(self.variable)

    def whole(self) -> Any:
        return shards.value_of(self.variable)

    def set_whole(self, value: object) -> None:
        shards.set_value(self.variable, value)


# Set on variables whose memory a replica function may have kept.
ALIASED = "_keras_dist_lent"


def place(variable: keras.Variable, layout: Layout) -> None:
    """Moves a variable's value to a layout; other holders keep the array."""
    if shards.is_sharded(variable):
        return
    holder = [internals.array_of(variable)]
    if holder[0] is None or layout.holds(holder[0]):
        return
    if isinstance(holder[0], jax.core.Tracer):
        return
    if isinstance(holder[0], jax.Array) and arrays.is_shared(holder):
        # The first device would share this buffer, and a step delete it.
        holder[0] = arrays.copy_of(holder[0])
    internals.set_array(variable, layout.place(holder[0]))


def shard_on(array: jax.Array, device: object) -> Any:
    """Returns an array's shard on a device, or copies the array there."""
    if isinstance(array, jax.core.Tracer):
        return array
    # A shard would be another object, and no variable counts references to it.
    if array.devices() == {device}:
        return array
    if array.is_fully_replicated:
        for shard in array.addressable_shards:
            if shard.device == device:
                return shard.data
    # A loop of the framework's own may be traced: the copy is no part of it.
    with arrays.eagerly():
        return jax.device_put(array, device)


def own_shard_on(array: jax.Array, device: object) -> Any:
    """Returns an array on a device, for a holder that may keep it."""
    shard = shard_on(array, device)
    if isinstance(array, jax.core.Tracer) or len(array.devices()) == 1:
        return shard
    return arrays.copy_of(shard)


def read_aliased(variable: keras.Variable, device: object) -> Any:
    """Returns a variable's value on a device, to keep; it may share memory."""
    array = internals.array_of(variable)
    # From another device, `shard_on` copies.
    if not shards.is_sharded(variable) and device in array.devices():
        vars(variable)[ALIASED] = True
    return shard_on(array, device)
