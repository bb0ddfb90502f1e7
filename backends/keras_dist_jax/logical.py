"""Replicas of several logical devices, whose programs the compiler divides."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.core.variable_layouts import LOGICAL
from keras_dist.plugin.powers import UsesLogicalDevices
from keras_dist_jax import sharded_steps
from keras_dist_jax.layout import MeshLayout
from keras_dist_jax.layout import StepFn
from keras_dist_jax.meshes import mesh_on
from keras_dist_jax.scatters import with_whole_rows
from keras_dist_jax.sharded import JaxShardedExecutor
from keras_dist_jax.tracing import current_trace

_ANY = PartitionSpec.UNCONSTRAINED


class LogicalLayout(MeshLayout):
    """State on the devices of several replicas, which have several each."""

    def __init__(self, replicas: Sequence[Sequence[Any]]) -> None:
        # An axis for each prime factor: tensors can be split along several of
        # their axes.
        sizes = [*_prime_factors(len(replicas[0]))]
        names = [LOGICAL]
        if len(sizes) > 1:
            names = [f"{LOGICAL}{index}" for index in range(len(sizes))]
        devices = np.array(replicas).reshape(len(replicas), *sizes)
        super().__init__([own[0] for own in replicas], mesh_on(devices, *names))
        self.holders = tuple(device for own in replicas for device in own)
        self.logical_axes = dict(zip(names, sizes, strict=True))

    def uneven(self, step: StepFn) -> StepFn:
        return with_whole_rows(step, self.whole.mesh)

    def axes_for(self, parts: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the axes of the mesh that divide a tensor's axes."""
        left = dict(self.logical_axes)
        found = []
        for count in parts:
            own = []
            for name, size in list(left.items()):
                if count % size == 0:
                    count //= left.pop(name)
                    own.append(name)
            found.append(tuple(own))
        return found


class JaxLogicalExecutor(JaxShardedExecutor, UsesLogicalDevices):
    """The executor that shards variables over logical devices."""

    layout: LogicalLayout

    def split_tensor(self, tensor: Any, parts: Sequence[int]) -> Any:
        trace = current_trace()
        is_in_program = trace is not None or sharded_steps.is_in_step()
        if not is_in_program or not isinstance(tensor, jax.core.Tracer):
            return tensor
        spec: list[Any] = [*self.layout.axes_for(parts)]
        if trace is None or trace.region is None:
            spec = _of_all_replicas(spec)
        sharding = NamedSharding(self.layout.whole.mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(tensor, sharding)


def _of_all_replicas(spec: list[Any]) -> list[Any]:
    """Returns the spec of a tensor that has the rows of all replicas."""
    if not any(spec):
        return [_ANY, *spec[1:]][: len(spec)]
    first, *others = spec
    return [
        ("replica", *first) if first else _ANY,
        *(axes or _ANY for axes in others),
    ]


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor
