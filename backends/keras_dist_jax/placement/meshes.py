"""Meshes of replicas' devices, and the shardings of arrays on them."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.plugins import LOGICAL
from keras_dist_jax.programs.jaxprs import AXIS


def mesh_on(replicas: Sequence[Sequence[Any]]) -> Mesh:
    """Makes a mesh of replicas, with further axes for their logical devices."""
    # An axis for each prime factor: tensors can be split along several of
    # their axes.
    sizes = [*_prime_factors(len(replicas[0]))]
    names = [f"{LOGICAL}{index}" for index in range(len(sizes))]
    axes = (AXIS, *([LOGICAL] if len(sizes) == 1 else names))
    devices = np.array(replicas).reshape(len(replicas), *sizes)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def shardings_on(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of arrays that are replicated, and sharded."""
    return (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec(AXIS)),
    )


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor
