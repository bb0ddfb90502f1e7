"""Collectives of workers, by small programs on one device of each worker.

Values pass through host memory, packed into buffers of few sizes: so there
are few programs, whatever the tensors' shapes.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.core.options import CommunicationOptions
from keras_dist.core.packing import in_packs
from keras_dist.core.packing import packs
from keras_dist.core.packing import places
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.meetings import Meetings
from keras_dist.plugin.workers import Workers
from keras_dist_jax.gate import Gate
from keras_dist_jax.gate import OneAtATime
from keras_dist_jax.gate import WatchedGate
from keras_dist_jax.machine import devices_by_worker
from keras_dist_jax.watch import Watch

_AXIS = "worker"
_SMALLEST = 64
# Words in the runtime's errors when it can't reach a worker.
_SIGNS = ("gloo", "nccl", "coordination service", "unavailable:")


class JaxWorkers(Workers):
    """The workers of a cluster that JAX has joined."""

    def __init__(
        self,
        cluster: Cluster,
        options: CommunicationOptions,
        watch: Watch,
        gate: Gate,
    ) -> None:
        super().__init__(cluster, options)
        self._watch = watch
        self.meetings = Meetings(cluster, watch, watch.check)
        self._gates: dict[int | None, WatchedGate] = {}
        self._gate = self.watched(gate)
        self._device = jax.local_devices()[0]
        mesh = Mesh(np.array([own[0] for own in devices_of(cluster)]), (_AXIS,))
        self._cut = NamedSharding(mesh, PartitionSpec(_AXIS))
        whole = NamedSharding(mesh, PartitionSpec())

        def over_workers(fn: Callable[[Any], Any]) -> Any:
            mapped = jax.shard_map(
                fn,
                mesh=mesh,
                in_specs=PartitionSpec(_AXIS),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
            return jax.jit(mapped, out_shardings=whole)

        self._summed = over_workers(
            lambda buffers: [lax.psum(own[0], _AXIS) for own in buffers]
        )
        self._gathered = over_workers(
            lambda buffers: [lax.all_gather(own[0], _AXIS) for own in buffers]
        )

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        values = [np.asarray(tensor) for tensor in tensors]
        if not values:
            return []
        groups = packs([value.dtype for value in values])
        packed = [
            np.concatenate([values[index].ravel() for index in group])
            for group in groups
        ]
        # One program for all dtypes, as each program is a meeting.
        totals = iter(self._met(self._summed, *packed))

        def summed(pack: list[np.ndarray[Any, Any]]) -> list[Any]:
            total = next(totals)
            where = places([value.size for value in pack])
            return [
                self._here(total[place].reshape(value.shape))
                for place, value in zip(where, pack, strict=True)
            ]

        return in_packs(summed, groups, values)

    def gather(self, tensors: Sequence[Any]) -> list[list[Any]]:
        values = [np.asarray(tensor) for tensor in tensors]
        (everyone,) = self._met(self._gathered, _bytes_of(values))
        return [
            [self._here(value) for value in _values_of(own, values)]
            for own in everyone
        ]

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        values = [np.asarray(tensor) for tensor in tensors]
        packed = _bytes_of(values)
        if not self.cluster.is_chief:
            packed = np.zeros_like(packed)
        # A sum of bit patterns that are zero on all but the chief is exact for
        # any dtype.
        (chief,) = self._met(self._summed, packed)
        return [self._here(value) for value in _values_of(chief, values)]

    def concatenate(self, tensor: Any, axis: int) -> Any:
        value = np.asarray(tensor)
        sizes = self.concatenate_numbers([value.shape[axis]])
        missing = max(sizes) - value.shape[axis]
        widths = [(0, missing if i == axis else 0) for i in range(value.ndim)]
        padded = np.pad(value, widths)
        (everyone,) = self._met(self._gathered, _bytes_of([padded]))
        parts = [
            np.take(_values_of(own, [padded])[0], range(size), axis)
            for own, size in zip(everyone, sizes, strict=True)
        ]
        return self._here(np.concatenate(parts, axis))

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Sends integers below 2**31, equally many from each worker, to all."""
        # The first numbers fit the smallest buffer, so that workers with
        # different counts run the same program, and find the difference.
        first, rest = numbers[: _SMALLEST - 1], numbers[_SMALLEST - 1 :]
        own = np.array([len(numbers), *first], "int32")
        (found,) = self._met(self._gathered, own)
        counts = [int(count) for count in found[:, 0]]
        if len(set(counts)) > 1:
            raise ReplicaDivergenceError(
                "Workers called a function with arguments of different "
                f"structures. Received: {counts} sizes on workers 0 to "
                f"{len(counts) - 1}. Expected: the same structure and ranks "
                "on each. Look for data that ends earlier on one of the "
                "workers."
            )
        everyone = [[int(n) for n in each[1:]] for each in found]
        if rest:
            (found,) = self._met(self._gathered, np.array(rest, "int32"))
            for each, more in zip(everyone, found, strict=True):
                each.extend(int(n) for n in more)
        return everyone

    def explain(self, error: BaseException) -> BaseException:
        if isinstance(error, WorkerLostError):
            return error
        text = str(error).lower()
        if not any(sign in text for sign in _SIGNS):
            return error
        return self._watch.culprits() or error

    def leave(self, reason: str, failed: bool) -> None:
        self._watch.leave(reason, failed)

    def watched(self, gate: Gate) -> Gate:
        """Wraps the gate of programs of several workers with the watch."""
        # One wrapper for each gate: with two, the end of an inner wait would
        # tell the watch that the outer one is over too.
        key = id(gate) if isinstance(gate, OneAtATime) else None
        watched = WatchedGate(gate, self._watch, self.explain)
        return self._gates.setdefault(key, watched)

    def _met(
        self, program: Any, *buffers: np.ndarray[Any, Any]
    ) -> list[np.ndarray[Any, Any]]:
        try:
            with self._gate.lock:
                self._gate.settle(self)
                results = program([*map(self._placed, buffers)])
                found = [np.asarray(r.addressable_data(0)) for r in results]
        except Exception as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error
        return [
            each[..., : buffer.size]
            for each, buffer in zip(found, buffers, strict=True)
        ]

    def _placed(self, buffer: np.ndarray[Any, Any]) -> Any:
        size = max(_SMALLEST, 1 << (buffer.size - 1).bit_length())
        own = np.zeros((1, size), buffer.dtype)
        own[0, : buffer.size] = buffer
        return jax.make_array_from_single_device_arrays(
            (self.cluster.num_workers, size),
            self._cut,
            [jax.device_put(own, self._device)],
        )

    def _here(self, value: np.ndarray[Any, Any]) -> Any:
        return jax.device_put(value, self._device)


def devices_of(cluster: Cluster, platform: str | None = None) -> list[Any]:
    """Returns each worker's `jax.Device`s, equally many, in the same order."""
    by_worker = devices_by_worker(platform, cluster.num_workers)
    counts = [len(own) for own in by_worker]
    if len(set(counts)) > 1:
        raise ClusterError(
            "Each worker needs as many devices as the others. Received: "
            f"{counts} devices on workers 0 to {len(counts) - 1}. Expected: "
            "the same number on each. Hide some devices, for instance with "
            "CUDA_VISIBLE_DEVICES, or set KERAS_DIST_VIRTUAL_DEVICES to one "
            "number on all workers."
        )
    return [sorted(own, key=lambda device: device.id) for own in by_worker]


def _bytes_of(
    values: Sequence[np.ndarray[Any, Any]],
) -> np.ndarray[Any, Any]:
    data = b"".join(value.tobytes() for value in values)
    return np.frombuffer(data + bytes(-len(data) % 4), np.uint32)


def _values_of(
    packed: np.ndarray[Any, Any], likes: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    data, start, values = packed.tobytes(), 0, []
    for like in likes:
        own = np.frombuffer(data, like.dtype, like.size, start)
        values.append(own.reshape(like.shape))
        start += like.nbytes
    return values
