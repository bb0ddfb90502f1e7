"""Replicas of several logical devices, whose programs the compiler divides."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.plugins import UsesLogicalDevices
from keras_dist_jax.executors.sharded import JaxShardedExecutor
from keras_dist_jax.functions.tracing import current_trace
from keras_dist_jax.sharding import sharded_steps

_ANY = PartitionSpec.UNCONSTRAINED


class JaxLogicalExecutor(JaxShardedExecutor, UsesLogicalDevices):
    """The executor that shards variables over logical devices."""

    def split_tensor(self, tensor: Any, parts: Sequence[int]) -> Any:
        trace = current_trace()
        is_in_program = trace is not None or sharded_steps.is_in_step()
        if not is_in_program or not isinstance(tensor, jax.core.Tracer):
            return tensor
        spec: list[Any] = [*_axes_for(parts, self.layout.logical_axes)]
        if trace is None or trace.of_replica is None:
            spec = _of_all_replicas(spec)
        sharding = NamedSharding(
            self.layout.replicated.mesh, PartitionSpec(*spec)
        )
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


def _axes_for(
    parts: Sequence[int], logical_axes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Returns the axes of the mesh that divide a tensor's axes."""
    left = dict(logical_axes)
    axes = []
    for count in parts:
        names = []
        for name, size in list(left.items()):
            if count % size == 0:
                count //= left.pop(name)
                names.append(name)
        axes.append(tuple(names))
    return axes
