"""DeviceAssignment: the cores of a TPU that each replica computes on."""

import enum
import math
from typing import final

import numpy as np

from keras_dist.core.rings import ring
from keras_dist.core.topology import RANK
from keras_dist.core.topology import Array
from keras_dist.core.topology import Topology
from keras_dist.core.topology import integers


class DeviceOrderMode(enum.IntEnum):
    """Order of the cores and of the replicas of a `DeviceAssignment`.

    `AUTO` forms rings where it can. `RING` forms rings or fails. `MESH` goes
    through the mesh side by side.
    """

    AUTO = 0
    RING = 1
    MESH = 2


@final
class DeviceAssignment:
    """The cores of a TPU that each replica computes on.

    `DeviceAssignment.build` chooses the cores.

    Args:
        topology: `Topology` of the TPU.
        core_assignment: Array of integers with the shape
            `(num_replicas, num_cores_per_replica, 4)`: the place of each core.

    Raises:
        ValueError: If `topology` is any other object, or if the array has
            another shape or places that are not in the mesh.

    Example:

    >>> from keras_dist.tpu.experimental import DeviceAssignment, Topology
    >>> topology = Topology(
    ...     mesh_shape=[1, 1, 1, 2],
    ...     device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]],
    ... )
    >>> assignment = DeviceAssignment.build(topology, num_replicas=2)
    >>> [assignment.tpu_ordinal(replica) for replica in range(2)]
    [0, 1]
    """

    def __init__(self, topology: Topology, core_assignment: object) -> None:
        self._topology = _checked(topology)
        self._core_assignment = integers("core_assignment", core_assignment)
        shape = self._core_assignment.shape
        if len(shape) != 3 or shape[-1] != RANK:
            raise ValueError(
                "`core_assignment` must be an array of shape (num_replicas, "
                f"num_cores_per_replica, {RANK}). Received: the shape {shape}."
            )
        # The topology raises an error for a place that is not in the mesh.
        self._tasks = [
            [topology.task_ordinal_at_coordinates(place) for place in replica]
            for replica in self._core_assignment
        ]

    @property
    def topology(self) -> Topology:
        """The `Topology` of the TPU."""
        return self._topology

    @property
    def num_cores_per_replica(self) -> int:
        """Number of cores of each replica."""
        return int(self._core_assignment.shape[1])

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return int(self._core_assignment.shape[0])

    @property
    def core_assignment(self) -> Array:
        """Array of shape `(num_replicas, num_cores_per_replica, 4)`."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the place of a core.

        Args:
            replica: Integer, the position of the replica.
            logical_core: Integer, the position of the core in the replica.

        Returns:
            Tuple of 4 integers, `(x, y, z, core)`.
        """
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas with a core that belongs to a task.

        Args:
            task_id: Integer, the task.
            logical_core: Integer, the position of the core in the replica.

        Returns:
            Sorted list of positions of replicas.

        Raises:
            ValueError: If there is none.
        """
        replicas = [
            replica
            for replica, tasks in enumerate(self._tasks)
            if task_id in tasks[logical_core : logical_core + 1]
        ]
        if not replicas:
            raise ValueError(
                f"No replica has its core {logical_core} in task {task_id}. "
                f"Expected: a core below {self.num_cores_per_replica}, and one "
                "of the tasks that the replicas use."
            )
        return replicas

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the position of a core among the cores of its task.

        Args:
            replica: Integer, the position of the replica.
            logical_core: Integer, the position of the core in the replica.
        """
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the CPU of a core's host.

        Args:
            replica: Integer, the position of the replica.
            logical_core: Integer, the position of the core in the replica.
            job: String, the task's job, or `None` for a name without a job.
        """
        place = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(place, job)

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of a core.

        Args:
            replica: Integer, the position of the replica.
            logical_core: Integer, the position of the core in the replica.
            job: String, the task's job, or `None` for a name without a job.
        """
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(place, job)

    @classmethod
    def build(
        cls,
        topology: Topology | bytes,
        computation_shape: object = None,
        computation_stride: object = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Chooses cores that are near each other for each replica.

        Args:
            topology: `Topology` of the TPU, or the bytes of one.
            computation_shape: Sequence of 4 positive integers, the sides of
                the block of cores of a replica, or `None` for one core.
            computation_stride: Sequence of 4 positive integers, the distance
                of the cores in a block along each side, or `None` for 1.
            num_replicas: Integer, number of replicas, at least 1.
            device_order_mode: `DeviceOrderMode`, the order of the cores.

        Returns:
            A `DeviceAssignment`.

        Raises:
            ValueError: If the blocks don't fit into the mesh, if cores are
                missing for them, or if they can't form the rings that
                `device_order_mode` asks for.
        """
        if isinstance(topology, bytes):
            topology = Topology(topology)
        blocks = _Blocks(
            _checked(topology),
            _sides("computation_shape", computation_shape),
            _sides("computation_stride", computation_stride),
            num_replicas,
        )
        if topology.missing_devices.size:
            return cls(topology, blocks.in_task_order())
        if blocks.forms_rings(device_order_mode):
            return cls(topology, blocks.in_rings())
        return cls(topology, blocks.in_mesh())


class _Blocks:
    """The blocks of cores that replicas get, in a mesh."""

    def __init__(
        self, topology: Topology, shape: Array, stride: Array, num_replicas: int
    ) -> None:
        self._topology, self._num = topology, num_replicas
        self._shape, self._stride = shape, stride
        self._footprint = shape * stride
        mesh = topology.mesh_shape
        if np.any(self._footprint > mesh):
            raise ValueError(
                "The cores of a replica don't fit into the mesh. Received: a "
                f"block of {self._footprint.tolist()}, with its strides. "
                f"Expected: at most {mesh.tolist()}."
            )
        self._counts = mesh // self._footprint * stride
        self._most = math.prod(self._counts.tolist())
        is_integer = isinstance(num_replicas, (int, np.integer))
        if not is_integer or not 1 <= num_replicas <= self._most:
            raise ValueError(
                f"A mesh of {mesh.tolist()} has room for 1 to {self._most} "
                f"replicas of {shape.tolist()} cores with strides of "
                f"{stride.tolist()}. Received: num_replicas={num_replicas!r}."
            )

    def forms_rings(self, mode: DeviceOrderMode) -> bool:
        """Tells whether the chips of blocks, and the blocks, form rings."""
        can = bool(
            self._shape[-1] == self._topology.mesh_shape[-1]
            and np.all(self._stride == 1)
            and self._num == self._most
        )
        if mode == DeviceOrderMode.RING and not can:
            raise ValueError(
                "The replicas can't form a ring.\nReceived: "
                f"device_order_mode={mode!r}. Expected: replicas that have all "
                "cores of their chips, without strides, and together the "
                "whole mesh. Else pass `DeviceOrderMode.AUTO`."
            )
        return can and mode != DeviceOrderMode.MESH

    def in_rings(self) -> list[list[list[int]]]:
        """Returns the places of cores, along a ring in a ring of blocks."""
        *sides, num_cores = self._shape.tolist()
        starts = [
            [a * b for a, b in zip(block, sides, strict=True)]
            for block in ring(*self._grid()[:-1])
        ]
        return [
            [
                [*(a + b for a, b in zip(start, chip, strict=True)), core]
                for chip in ring(*sides)
                for core in range(num_cores)
            ]
            for start in starts
        ]

    def in_mesh(self) -> Array:
        """Returns the places of cores, side by side; cores of a chip first."""
        order = [RANK - 1, *range(RANK - 1)]
        grid = self._grid()
        starts = np.zeros((self._num, RANK), np.int64)
        left = np.arange(self._num)
        for axis in order:
            left, position = np.divmod(left, grid[axis])
            outer, inner = np.divmod(position, self._stride[axis])
            starts[:, axis] = outer * self._footprint[axis] + inner
        cores = np.indices(self._shape.tolist()).reshape(RANK, -1).T
        cores *= self._stride
        return integers("cores", starts[:, None] + cores)

    def in_task_order(self) -> Array:
        """Returns the places of cores, in the tasks' order."""
        places = self._topology.device_coordinates.reshape(-1, RANK)
        size = math.prod(self._shape.tolist())
        if np.any(self._stride > 1) or self._num * size > len(places):
            raise ValueError(
                f"Cores are missing in the mesh: {len(places)} are there. "
                f"Received: num_replicas={self._num} with {size} cores each, "
                f"and strides of {self._stride.tolist()}. Expected: no more "
                "cores than are there, and no strides."
            )
        return places[: self._num * size].reshape(self._num, size, RANK)

    def _grid(self) -> list[int]:
        """Returns the number of blocks along each side, as in a cube."""
        grid, left = [0] * RANK, self._num
        # Short sides first, as they limit the others; of equal ones the cores
        # of a chip, then x.
        order = sorted(
            range(RANK),
            key=lambda axis: (self._counts[axis], (axis + 1) % RANK),
        )
        for done, axis in enumerate(order):
            edge = math.ceil(left ** (1 / (RANK - done)))
            grid[axis] = min(edge, int(self._counts[axis]))
            left = math.ceil(left / grid[axis])
        return grid


def _checked(topology: object) -> Topology:
    if not isinstance(topology, Topology):
        raise ValueError(
            "`topology` must be a `keras_dist.tpu.experimental.Topology`. "
            f"Received: {topology!r} of type {type(topology).__name__}."
        )
    return topology


def _sides(name: str, values: object) -> Array:
    sides = integers(name, [1] * RANK if values is None else values)
    if sides.shape != (RANK,) or np.any(sides < 1):
        raise ValueError(
            f"`{name}` must be a sequence of {RANK} positive integers, or "
            f"None. Received: {values!r}."
        )
    return sides
