"""Meshes of devices, and the shardings of arrays on them."""

from typing import Any

import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec


def mesh_on(devices: Any, *names: str) -> Mesh:
    """Makes a mesh with the axis "replica", and further ones, of devices."""
    axes = ("replica", *names)
    return Mesh(
        np.array(devices), axes, axis_types=(AxisType.Auto,) * len(axes)
    )


def shardings_on(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of arrays that are whole on each device, or cut."""
    return (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("replica")),
    )
