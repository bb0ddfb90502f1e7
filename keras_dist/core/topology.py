"""Topology: the places of a TPU's cores in the mesh that connects them."""

import json
from collections.abc import Sequence
from typing import Any
from typing import final

import numpy as np
from numpy.typing import NDArray

# Sides of a mesh: x, y and z of a chip, and the core on the chip.
RANK = 4
_MOST = np.iinfo(np.int32).max

Array = NDArray[np.int32]


@final
class Topology:
    """The cores of a TPU, and their places in the mesh that connects them.

    A place is `(x, y, z, core)`: the coordinates of a chip, and the position
    of a core on that chip. A task is a worker, on a host of its own.

    Args:
        serialized: Bytes from `serialized()`, or `None`. With bytes, the other
            arguments are ignored. Bytes from TensorFlow are an error.
        mesh_shape: Sequence of 4 positive integers, the sides of the mesh.
        device_coordinates: Array of integers with the shape
            `(tasks, devices, 4)`: the place of each core of each task.

    Raises:
        ValueError: If the bytes or the arrays don't describe a mesh.

    Example:

    >>> places = [[[0, 0, 0, 0], [0, 0, 0, 1]], [[1, 0, 0, 0], [1, 0, 0, 1]]]
    >>> topology = keras_dist.tpu.experimental.Topology(
    ...     mesh_shape=[2, 1, 1, 2], device_coordinates=places
    ... )
    >>> topology.num_tasks, topology.num_tpus_per_task
    (2, 2)
    >>> topology.tpu_device_name_at_coordinates([1, 0, 0, 1], job="worker")
    '/job:worker/task:1/device:TPU:1'
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: object = None,
        device_coordinates: object = None,
    ) -> None:
        if serialized:
            mesh_shape, device_coordinates = _read(serialized)
        self._mesh_shape = _shape(mesh_shape)
        self._device_coordinates = _places(device_coordinates, self._mesh_shape)
        self._tasks = np.full(self._mesh_shape, -1, np.int32)
        self._devices = self._tasks.copy()
        indices = tuple(np.moveaxis(self._device_coordinates, -1, 0))
        counts = self._device_coordinates.shape[:2]
        self._tasks[indices], self._devices[indices] = np.indices(counts)

    @property
    def mesh_shape(self) -> Array:
        """Array of 4 integers, the sides of the mesh."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """Number of sides of the mesh, 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> Array:
        """Array of shape `(tasks, devices, 4)`: the place of each core."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> NDArray[np.int64]:
        """Array of shape `(n, 4)`: the places of the mesh without a core."""
        return np.argwhere(self._tasks < 0)

    @property
    def num_tasks(self) -> int:
        """Number of tasks, each of which has cores."""
        return int(self._device_coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """Number of cores of each task."""
        return int(self._device_coordinates.shape[1])

    def task_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the task of the core at a place; -1 without a core.

        Args:
            device_coordinates: Sequence of 4 integers, a place.

        Raises:
            ValueError: If the mesh has no such place.
        """
        return int(self._tasks[self._index(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the position of a core in its task; -1 without a core.

        Args:
            device_coordinates: Sequence of 4 integers, a place.

        Raises:
            ValueError: If the mesh has no such place.
        """
        return int(self._devices[self._index(device_coordinates)])

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the CPU of a core's host.

        Args:
            device_coordinates: Sequence of 4 integers, a place.
            job: String, the task's job, or `None` for a name without a job.

        Raises:
            ValueError: If the mesh has no such place.
        """
        return f"{self._host(device_coordinates, job)}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the core at a place.

        Args:
            device_coordinates: Sequence of 4 integers, a place.
            job: String, the task's job, or `None` for a name without a job.

        Raises:
            ValueError: If the mesh has no such place.
        """
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{self._host(device_coordinates, job)}/device:TPU:{ordinal}"

    def serialized(self) -> bytes:
        """Returns the topology as bytes, for another `Topology`."""
        content = {
            "mesh_shape": self._mesh_shape.tolist(),
            "device_coordinates": self._device_coordinates.tolist(),
        }
        return json.dumps(content).encode()

    def _host(self, place: Sequence[int], job: str | None) -> str:
        task = self.task_ordinal_at_coordinates(place)
        return f"/task:{task}" if job is None else f"/job:{job}/task:{task}"

    def _index(self, place: Sequence[int]) -> tuple[int, ...]:
        index = integers("device_coordinates", place)
        if index.shape != (RANK,) or not _is_within(index, self._mesh_shape):
            raise ValueError(
                "There is no such place in the mesh. Received: "
                f"{index.tolist()}. Expected: (x, y, z, core), each at least 0 "
                f"and below {self._mesh_shape.tolist()}."
            )
        return tuple(index)


def _is_within(places: NDArray[Any], mesh_shape: Array) -> bool:
    return bool(np.all((places >= 0) & (places < mesh_shape)))


def _shape(mesh_shape: object) -> Array:
    sides = integers("mesh_shape", mesh_shape)
    if sides.shape != (RANK,) or np.any(sides < 1):
        raise ValueError(
            "`mesh_shape` must be a sequence of 4 positive integers. Received: "
            f"mesh_shape={mesh_shape!r}."
        )
    return sides


def _places(coordinates: object, mesh_shape: Array) -> Array:
    places = integers("device_coordinates", coordinates)
    if places.ndim != 3 or places.shape[-1] != RANK:
        raise ValueError(
            "`device_coordinates` must be an array of shape (tasks, devices, "
            f"4). Received: the shape {places.shape}."
        )
    if not _is_within(places, mesh_shape):
        raise ValueError(
            "`device_coordinates` must be places of the mesh. Received: "
            f"{places.tolist()}. Expected: (x, y, z, core), each at least 0 "
            f"and below {mesh_shape.tolist()}."
        )
    distinct, counts = np.unique(
        places.reshape(-1, RANK), axis=0, return_counts=True
    )
    if np.any(counts > 1):
        raise ValueError(
            "Each core must have a place of its own. Received: "
            f"{counts.max()} cores at {distinct[counts.argmax()].tolist()}."
        )
    return places


def integers(name: str, values: object) -> Array:
    """Converts an argument to an array of integers."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    is_integer = np.issubdtype(array.dtype, np.integer)
    if not is_integer or np.any(np.abs(array) > _MOST):
        raise ValueError(
            f"`{name}` must be an array of integers. Received: {values!r} of "
            f"type {type(values).__name__}."
        )
    return array.astype(np.int32)


def _read(serialized: bytes) -> tuple[Any, Any]:
    """Returns the sides of a mesh and the places of cores in it."""
    try:
        content = json.loads(serialized)
        return content["mesh_shape"], content["device_coordinates"]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            "The topology could not be read from bytes.\nReceived: "
            f"{serialized!r} of type {type(serialized).__name__}. Expected: "
            "the result of keras_dist's `Topology.serialized()`. TensorFlow "
            "reads its own: pass `mesh_shape` and `device_coordinates` of its "
            "`tf.tpu.experimental.Topology(serialized)`."
        ) from error
