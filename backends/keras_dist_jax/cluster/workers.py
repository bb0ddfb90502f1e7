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
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.errors import ClusterError
from keras_dist.errors import KerasDistError
from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import Like
from keras_dist.plugins import Messages
from keras_dist.plugins import Workers
from keras_dist.plugins import in_packs
from keras_dist.plugins import packs
from keras_dist.plugins import places
from keras_dist.plugins import values_of
from keras_dist_jax.cluster.watch import Watch
from keras_dist_jax.cluster.watched import WatchedThrottle
from keras_dist_jax.machine import devices_by_worker
from keras_dist_jax.throttle import OneAtATime
from keras_dist_jax.throttle import Throttle

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
        throttle: Throttle,
    ) -> None:
        super().__init__(cluster, options)
        self._watch = watch
        watch.recorder = self.recorder
        self.messages = Messages(cluster, watch, watch.check)
        self._throttles: dict[int | None, WatchedThrottle] = {}
        self._throttle = self.watched(throttle)
        self._device = jax.local_devices()[0]
        mesh = Mesh(
            np.array([devices[0] for devices in devices_of(cluster)]), (_AXIS,)
        )
        self._cut = NamedSharding(mesh, PartitionSpec(_AXIS))

        whole = PartitionSpec()

        def over_workers(
            fn: Callable[[Any], Any], gives: object = whole
        ) -> Any:
            mapped = jax.shard_map(
                fn,
                mesh=mesh,
                in_specs=PartitionSpec(_AXIS),
                out_specs=gives,
                check_vma=False,
            )
            return jax.jit(mapped, out_shardings=NamedSharding(mesh, gives))

        self._summed = over_workers(
            lambda buffers: [lax.psum(buffer[0], _AXIS) for buffer in buffers]
        )
        self._gathered = over_workers(
            lambda buffers: [
                lax.all_gather(buffer[0], _AXIS) for buffer in buffers
            ]
        )
        # Frames travel by a collective that no program of a model begins with:
        # one that meets another would end the process.
        count = cluster.num_workers
        self._swapped = over_workers(
            lambda buffers: [
                lax.all_to_all(
                    jnp.broadcast_to(buffer, (count, buffer.shape[1])),
                    _AXIS,
                    0,
                    0,
                )
                for buffer in buffers
            ],
            PartitionSpec(_AXIS),
        )

    def swap(self, data: np.ndarray) -> np.ndarray:
        missing = -data.size % 4
        words = np.pad(data, (0, missing)).view(np.uint32)
        if data.size == self._frame_size:
            (gathered,) = self._met(self._swapped, words)
        else:
            (gathered,) = self._met(self._gathered, words)
        rows: np.ndarray = gathered.view(np.uint8)[:, : data.size]
        return rows

    def on_host(self, tensor: object) -> np.ndarray:
        return np.asarray(tensor)

    def here(self, value: np.ndarray) -> Any:
        return jax.device_put(value, self._device)

    def sum_alike(self, tensors: Sequence[Any]) -> list[Any]:
        values = [np.asarray(tensor) for tensor in tensors]
        groups = packs([value.dtype for value in values])
        packed = [
            np.concatenate([values[index].ravel() for index in group])
            for group in groups
        ]
        # One program for all dtypes, as workers meet at each.
        totals = iter(self._met(self._summed, *packed))

        def summed(pack: list[np.ndarray[Any, Any]]) -> list[Any]:
            total = next(totals)
            where = places([value.size for value in pack])
            return [
                self.here(total[place].reshape(value.shape))
                for place, value in zip(where, pack, strict=True)
            ]

        return in_packs(summed, groups, values)

    def broadcast_alike(self, tensors: Sequence[Any]) -> list[Any]:
        likes = [Like.of(tensor) for tensor in tensors]
        data = b"".join(self.on_host(tensor).tobytes() for tensor in tensors)
        packed = np.frombuffer(data + bytes(-len(data) % 4), np.uint32)
        if not self.cluster.is_chief:
            packed = np.zeros_like(packed)
        # A sum of bit patterns that are zero on all but the chief is exact for
        # any dtype.
        (chief,) = self._met(self._summed, packed)
        values = values_of(chief.tobytes(), likes)
        return [self.here(value) for value in values]

    def sizes(self, numbers: Sequence[int]) -> list[list[int]]:
        """Sends sizes, equally many from each worker, to all."""
        local = np.array(numbers, np.int64)
        layout = f"{local.size} sizes of arguments"
        bodies = self.swap_bytes("a function", layout, local.tobytes())
        return [np.frombuffer(body, np.int64).tolist() for body in bodies]

    def explain(self, error: BaseException) -> BaseException:
        if isinstance(error, KerasDistError):
            return error
        text = str(error).lower()
        if not any(sign in text for sign in _SIGNS):
            return error
        return self._watch.culprits() or error

    def leave(self, reason: str, failed: bool) -> None:
        self._watch.leave(reason, failed)

    def watched(self, throttle: Throttle) -> Throttle:
        """Wraps the throttle of programs of several workers with the watch."""
        # One wrapper for each throttle: with two, the end of an inner wait
        # would tell the watch that the outer one is over too.
        key = id(throttle) if isinstance(throttle, OneAtATime) else None
        watched = WatchedThrottle(
            throttle, self._watch, self.recorder, self.explain
        )
        return self._throttles.setdefault(key, watched)

    def _met(
        self, program: Any, *buffers: np.ndarray[Any, Any]
    ) -> list[np.ndarray[Any, Any]]:
        try:
            with self._throttle.lock:
                self._throttle.drain(self)
                results = program([*map(self._placed, buffers)])
                arrays = [np.asarray(r.addressable_data(0)) for r in results]
        except Exception as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error
        return [
            array[..., : buffer.size]
            for array, buffer in zip(arrays, buffers, strict=True)
        ]

    def _placed(self, buffer: np.ndarray[Any, Any]) -> Any:
        size = max(_SMALLEST, 1 << (buffer.size - 1).bit_length())
        padded = np.zeros((1, size), buffer.dtype)
        padded[0, : buffer.size] = buffer
        return jax.make_array_from_single_device_arrays(
            (self.cluster.num_workers, size),
            self._cut,
            [jax.device_put(padded, self._device)],
        )


def devices_of(cluster: Cluster, platform: str | None = None) -> list[Any]:
    """Returns each worker's `jax.Device`s, equally many, in the same order."""
    by_worker = devices_by_worker(platform, cluster.num_workers)
    counts = [len(devices) for devices in by_worker]
    if len(set(counts)) > 1:
        raise ClusterError(
            "Each worker needs as many devices as the others.\nReceived: "
            f"{counts} devices on workers 0 to {len(counts) - 1}. Expected: "
            "the same number on each. Hide some devices, for instance with "
            "CUDA_VISIBLE_DEVICES, or set KERAS_DIST_VIRTUAL_DEVICES to one "
            "number on all workers."
        )
    return [
        sorted(devices, key=lambda device: device.id) for devices in by_worker
    ]
