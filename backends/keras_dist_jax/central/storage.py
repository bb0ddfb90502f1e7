"""Central storage: one copy of each variable, away from the replicas.

Variables rest on a device and not in `pinned_host` memory: JAX refuses to
combine arrays of two memory spaces, so that `variable + tensor` would fail.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax.sharding import SingleDeviceSharding

from keras_dist.plugins import Device
from keras_dist.plugins import Owners
from keras_dist_jax.fit.running import Running
from keras_dist_jax.fit.running import Values
from keras_dist_jax.jax_internals import put_on
from keras_dist_jax.jax_internals import uncommitted
from keras_dist_jax.machine import is_described
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import SingleLayout
from keras_dist_jax.throttle import Throttle
from keras_dist_jax.variables.storage import shard_on


class LooseLayout(SingleLayout):
    """One of several devices that keep variables; JAX may move its arrays."""

    # Else variables of two such devices could not be combined.
    def holds(self, array: jax.Array) -> bool:
        if is_described(array):
            return super().holds(array)
        return Layout.holds(self, array) and not array.committed

    def place(self, array: jax.Array) -> Any:
        return uncommitted(super().place(array))


class StorageLayouts:
    """The device on which each variable of a central plan rests."""

    def __init__(self, owners: Owners, devices: Mapping[Device, Any]) -> None:
        self._owners = owners
        kind = SingleLayout if len(devices) == 1 else LooseLayout
        self._layouts = {d: kind(known) for d, known in devices.items()}
        self.primary = next(iter(self._layouts.values()))

    @property
    def devices(self) -> tuple[Any, ...]:
        """The first `jax.Device` that keeps variables, in a tuple."""
        return self.primary.devices

    @property
    def are_several(self) -> bool:
        """`True` if variables are on more than one device."""
        return len(self._layouts) > 1

    def of(self, variable: keras.Variable) -> SingleLayout:
        """Returns the layout of the one device that keeps a variable."""
        return self._layouts[self._owners.of(variable)]

    def place(self, array: jax.Array) -> Any:
        """Puts an array where it can be combined with any variable."""
        return self.primary.place(array)


class CentralRunning(Running):
    """The state of a model whose variables have one copy each."""

    def __init__(
        self,
        model: keras.Model,
        layout: Layout,
        throttle: Throttle,
        storage_layouts: StorageLayouts,
    ) -> None:
        super().__init__(model, layout, throttle)
        self.storage_layouts = storage_layouts
        # The key is the id of a copy that was sent to the devices that compute.
        # The value is the copy, and the array that it was made from.
        self._sent: dict[int, tuple[Any, Any]] = {}
        # True if the training step that Keras has leaves updates to storage.
        self.postpones = False

    def newest(self) -> Values:
        *results, last = self.last[-1]
        return last.values(results) if isinstance(last, Merge) else last

    def release(self) -> None:
        super().release()
        self._sent.clear()

    def storage_layout(self, variable: keras.Variable) -> Layout:
        return self.storage_layouts.of(variable)

    def devices_of_state(self) -> list[Any]:
        """Returns the `jax.Device` of each variable of the state, in order."""
        return [
            self.storage_layouts.of(variable).devices[0]
            for variable in itertools.chain(*self._variables)
        ]

    def lay_out(self, values: Values, names: Sequence[str]) -> None:
        self._sent.clear()
        trains = "optimizer_variables" in names
        if trains and self.postpones:
            if self.storage_layouts.are_several:
                _rehouse(values, self.devices_of_state())
            return
        for group in values:
            sent = send(group, self.layout)
            if not trains:
                pairs = zip(sent, group, strict=True)
                self._sent.update({id(pair[0]): pair for pair in pairs})
            group[:] = sent

    def rested(self, values: Values) -> Values:
        values = [
            [self._sent.get(id(value), (value, value))[1] for value in group]
            for group in values
        ]
        _rehouse(values, self.devices_of_state())
        if self.storage_layouts.are_several:
            values = [list(map(uncommitted, group)) for group in values]
        self._sent.clear()
        return values


@dataclasses.dataclass(eq=False)
class Merge:
    """The state after a step, put together from its programs' results."""

    groups: Values
    # The group, and the index in it, of each update's results.
    places: Sequence[Sequence[tuple[int, int]]]
    # The devices that values move to.
    targets: Sequence[Any] | None
    is_merged: bool = False

    def values(self, results: Sequence[Any]) -> Values:
        """Returns the groups, with the updates' results in their places."""
        if not self.is_merged:
            for places, result in zip(self.places, results, strict=True):
                for (group, index), value in zip(
                    places, result[1], strict=True
                ):
                    self.groups[group][index] = value
            if self.targets is not None:
                _rehouse(self.groups, self.targets)
            self.is_merged = True
            # Values that were moved would stay alive where they were made.
            for result in results:
                result[1].clear()
        return self.groups


def send(arrays: Sequence[Any], layout: Layout) -> list[Any]:
    """Copies arrays of one device each to all devices that compute."""
    return put_on(arrays, layout.replicated, layout.devices)


def bring(arrays: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
    """Puts arrays, each with whole shards, on one device each."""
    shards = list(map(_shard, arrays, devices))
    return [
        put_on([shard], _on(device), (device,))[0]
        for shard, device in zip(_staged(shards, devices), devices, strict=True)
    ]


@functools.cache
def _on(device: object) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)


def _staged(shards: list[Any], devices: Sequence[Any]) -> list[Any]:
    """Copies what leaves a GPU to pinned memory, all together.

    Else JAX waits for each copy, before the next one starts.
    """
    stages = {
        index: stage
        for index, (shard, device) in enumerate(
            zip(shards, devices, strict=True)
        )
        if (stage := _stage(shard, device)) is not None
    }
    if stages:
        leaving = [shards[index] for index in stages]
        pinned = jax.device_put(leaving, list(stages.values()))
        for index, shard in zip(stages, pinned, strict=True):
            shards[index] = shard
    return shards


def _stage(shard: Any, target: Any) -> SingleDeviceSharding | None:
    if is_described(shard):
        return None
    (source,) = shard.devices()
    return pinned_memory(source) if are_apart(source, target) else None


def are_apart(source: Any, target: Any) -> bool:
    """Tells whether a copy leaves a GPU for the host."""
    return bool(source.platform != "cpu" and target.platform == "cpu")


@functools.cache
def pinned_memory(device: Any) -> SingleDeviceSharding | None:
    """Returns the host's memory that a device copies to by itself, if any."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        return None
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def _shard(array: jax.Array, device: object) -> Any:
    """Returns a whole shard of an array, a device's own if it has one."""
    if is_described(array):
        return array
    if isinstance(array.sharding, SingleDeviceSharding):
        return array
    if device in array.sharding.device_set:
        return shard_on(array, device)
    return array.addressable_data(0)


def _rehouse(values: Values, devices: Sequence[Any]) -> None:
    """Moves all arrays of a state, in place, to the devices where they rest."""
    brought = iter(bring(list(itertools.chain(*values)), devices))
    for group in values:
        group[:] = itertools.islice(brought, len(group))
