"""Topology: the places of a TPU's cores in the mesh that connects them."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from itertools import chain
from itertools import islice
from typing import Any
from typing import final

import numpy as np
from numpy.typing import NDArray

# Sides of a mesh: x, y and z of a chip, and the core on the chip.
RANK = 4
# The fields of TensorFlow's `TopologyProto`, and the types of fields.
_MESH_SHAPE, _NUM_TASKS, _NUM_DEVICES, _COORDINATES = 1, 2, 3, 4
_INTEGER, _BYTES = 0, 2
_MOST = np.iinfo(np.int32).max

Array = NDArray[np.int32]


@final
class Topology:
    """The cores of a TPU, and their places in the mesh that connects them.

    A place is `(x, y, z, core)`: the coordinates of a chip, and the position
    of a core on that chip. A task is a worker, on a host of its own.

    Args:
        serialized: Bytes from `serialized()`, here or in TensorFlow, or
            `None`. With bytes, the other arguments are ignored.
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
        mesh_shape: Any = None,
        device_coordinates: Any = None,
    ) -> None:
        self._serialized = serialized
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
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
        """Returns the topology as the bytes of a `TopologyProto`."""
        if not self._serialized:
            self._serialized = b"".join(
                (
                    _field(_MESH_SHAPE, self._mesh_shape.tolist()),
                    _varints([_NUM_TASKS << 3, self.num_tasks]),
                    _varints([_NUM_DEVICES << 3, self.num_tpus_per_task]),
                    _field(
                        _COORDINATES, self._device_coordinates.ravel().tolist()
                    ),
                )
            )
        return self._serialized

    def _host(self, place: Sequence[int], job: str | None) -> str:
        task = self.task_ordinal_at_coordinates(place)
        return f"/task:{task}" if job is None else f"/job:{job}/task:{task}"

    def _index(self, place: Sequence[int]) -> tuple[int, ...]:
        found = integers("device_coordinates", place)
        if found.shape != (RANK,) or not _is_within(found, self._mesh_shape):
            raise ValueError(
                "There is no such place in the mesh. Received: "
                f"{found.tolist()}. Expected: (x, y, z, core), each at least 0 "
                f"and below {self._mesh_shape.tolist()}."
            )
        return tuple(found)


def _is_within(places: NDArray[Any], mesh_shape: Array) -> bool:
    return bool(np.all((places >= 0) & (places < mesh_shape)))


def _shape(mesh_shape: Any) -> Array:
    found = integers("mesh_shape", mesh_shape)
    if found.shape != (RANK,) or np.any(found < 1):
        raise ValueError(
            "`mesh_shape` must be a sequence of 4 positive integers. Received: "
            f"mesh_shape={mesh_shape!r}."
        )
    return found


def _places(coordinates: Any, mesh_shape: Array) -> Array:
    found = integers("device_coordinates", coordinates)
    if found.ndim != 3 or found.shape[-1] != RANK:
        raise ValueError(
            "`device_coordinates` must be an array of shape (tasks, devices, "
            f"4). Received: the shape {found.shape}."
        )
    if not _is_within(found, mesh_shape):
        raise ValueError(
            "`device_coordinates` must be places of the mesh. Received: "
            f"{found.tolist()}. Expected: (x, y, z, core), each at least 0 and "
            f"below {mesh_shape.tolist()}."
        )
    each, counts = np.unique(
        found.reshape(-1, RANK), axis=0, return_counts=True
    )
    if np.any(counts > 1):
        raise ValueError(
            "Each core must have a place of its own. Received: "
            f"{counts.max()} cores at {each[counts.argmax()].tolist()}."
        )
    return found


def integers(name: str, values: Any) -> Array:
    """Converts an argument to an array of integers."""
    try:
        found = np.asarray(values)
    except ValueError:  # lists of several lengths
        found = np.asarray(None)
    is_integer = np.issubdtype(found.dtype, np.integer)
    if not is_integer or np.any(np.abs(found) > _MOST):
        raise ValueError(
            f"`{name}` must be an array of integers. Received: {values!r} of "
            f"type {type(values).__name__}."
        )
    return found.astype(np.int32)


def _varints(values: Iterable[int]) -> bytes:
    """Encodes integers in groups of 7 bits, the lowest group first."""
    data = bytearray()
    for value in values:
        while value > 127:
            data.append(value & 127 | 128)
            value >>= 7
        data.append(value)
    return bytes(data)


def _varint(stream: Iterator[int]) -> int:
    """Decodes the next integer."""
    value = shift = 0
    for byte in stream:
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7
    raise _malformed("the end of the bytes within an integer")


def _field(number: int, values: Sequence[int]) -> bytes:
    data = _varints(values)
    return _varints([number << 3 | _BYTES, len(data)]) + data


def _parsed(serialized: bytes) -> tuple[list[int], NDArray[Any]]:
    """Reads the sides of a mesh and the places of cores."""
    if not isinstance(serialized, bytes):
        raise _malformed(f"{serialized!r} of type {type(serialized).__name__}")
    fields: dict[int, list[int]] = {}
    stream = iter(serialized)
    for first in stream:
        number, kind = divmod(_varint(chain([first], stream)), 8)
        values = fields.setdefault(number, [])
        if kind == _INTEGER:
            values.append(_varint(stream))
        elif kind == _BYTES:
            data = bytes(islice(stream, _varint(stream)))
            if number in (_MESH_SHAPE, _COORDINATES):
                values.extend(_unpacked(data))
        else:
            raise _malformed(f"field {number} of type {kind}")
    # A number that is 0 is left out.
    tasks, devices = (
        (fields.get(number) or [0])[-1] for number in (_NUM_TASKS, _NUM_DEVICES)
    )
    coordinates = fields.get(_COORDINATES, [])
    if len(coordinates) != tasks * devices * RANK:
        raise _malformed(
            f"{len(coordinates)} coordinates for {tasks} tasks with {devices} "
            f"devices, each with {RANK} coordinates"
        )
    places = np.array(coordinates).reshape(tasks, devices, RANK)
    return fields.get(_MESH_SHAPE, []), places


def _unpacked(data: bytes) -> Iterator[int]:
    stream = iter(data)
    for first in stream:
        yield _varint(chain([first], stream))


def _malformed(received: str) -> ValueError:
    return ValueError(
        "The topology could not be read from bytes. Received: "
        f"{received}. Expected: the result of `Topology.serialized()`."
    )
