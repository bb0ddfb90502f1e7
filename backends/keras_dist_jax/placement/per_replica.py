"""Per-replica values that are one array over the mesh."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from keras_dist.plugins import Mirrored
from keras_dist.plugins import PerReplica
from keras_dist_jax.machine import is_described
from keras_dist_jax.placement.layout import Layout


class JoinedPerReplica(PerReplica):
    """A per-replica value with components that are shards of one array."""

    # `joined` is an array over the layout's devices, split along its first
    # axis, or a tracer; it is `None` until it is made of `parts`. If `stacked`,
    # the first axis is for replicas; else components are concatenated along it.

    def __init__(
        self,
        joined: Any,
        stacked: bool,
        layout: Layout,
        parts: Sequence[Any] | None = None,
    ) -> None:
        self.joined = joined
        self.stacked = stacked
        self.layout = layout
        self._parts = None if parts is None else tuple(parts)

    @property
    def values(self) -> tuple[Any, ...]:
        if self._parts is None:
            parts = parts_of(self.joined, self.stacked, self.layout)
            self._parts = tuple(parts)
        return self._parts

    @classmethod
    def of_traced(
        cls, values: Sequence[Any], layout: Layout
    ) -> "JoinedPerReplica":
        """Stacks components inside of a program."""
        parts = [jnp.asarray(value) for value in values]
        check_equal(parts)
        return cls(jnp.stack(parts), True, layout)

    def in_a_program(self) -> "JoinedPerReplica":
        """Returns the same value, joined, while a function is traced."""
        if self.joined is not None:
            return self
        if any(isinstance(part, jax.core.Tracer) for part in self.values):
            return self.of_traced(self.values, self.layout)
        with jax.ensure_compile_time_eval():
            if not self.layout.are_even(self.values):
                raise UnevenError
            self.join()
        return self

    def join(self) -> None:
        """Sets `joined` to an array made of the components."""
        if self.joined is not None:
            return
        parts = self.values
        if len({(len(p.shape), p.dtype) for p in parts}) > 1:
            raise ValueError(
                "All components of a per-replica value go into one program. "
                f"Received: {[jax.typeof(p).str_short() for p in parts]}. "
                "Expected: the same dtype and the same number of axes in "
                "each."
            )
        check_equal(parts)
        self.stacked = not parts[0].shape
        self.joined = join(parts, self.stacked, self.layout)


class UnevenError(Exception):
    """Replicas have values of different shapes, so no program serves all."""


def check_equal(parts: Sequence[Any]) -> None:
    """Raises `UnevenError` if the components' shapes differ."""
    if len({tuple(part.shape) for part in parts}) > 1:
        raise UnevenError


class Local(PerReplica):
    """A per-replica value in a program, and this replica's own component."""

    def __init__(self, local: object, values: Sequence[Any]) -> None:
        super().__init__(values)
        self.local = local


def parts_of(joined: Any, stacked: bool, layout: Layout) -> list[Any]:
    """Returns the components of an array that the replicas divide."""
    count = layout.num_replicas
    if isinstance(joined, jax.core.Tracer):
        if not stacked:
            joined = joined.reshape(count, -1, *joined.shape[1:])
        return [joined[index] for index in range(count)]
    if is_described(joined):
        first = () if stacked else (joined.shape[0] // count,)
        part = jax.ShapeDtypeStruct((*first, *joined.shape[1:]), joined.dtype)
        return [part] * len(layout.devices)
    by_device = {
        shard.device: shard.data for shard in joined.addressable_shards
    }
    parts = [by_device[device] for device in layout.devices]
    return [jax.lax.squeeze(p, (0,)) for p in parts] if stacked else parts


def join(values: Sequence[Any], stacked: bool, layout: Layout) -> Any:
    """Joins the tensors of replicas, `stacked` along a new axis for them."""
    if any(map(is_described, values)):
        shape = (1, *values[0].shape) if stacked else values[0].shape
        return jax.ShapeDtypeStruct(
            (shape[0] * layout.num_replicas, *shape[1:]),
            values[0].dtype,
            sharding=layout.sharded,
        )
    placed = [
        jax.device_put(value, device)
        for value, device in zip(
            layout.spread(values), layout.holders, strict=True
        )
    ]
    if stacked:
        placed = [jax.lax.expand_dims(value, (0,)) for value in placed]
    shape = placed[0].shape
    return jax.make_array_from_single_device_arrays(
        (shape[0] * layout.num_replicas, *shape[1:]),
        layout.sharded,
        placed,
    )


def register_trees() -> None:
    """Makes `jax.tree` look into per-replica values."""
    for kind, built in (
        (PerReplica, PerReplica),
        (Mirrored, Mirrored),
        (JoinedPerReplica, PerReplica),
    ):
        jax.tree_util.register_pytree_node(
            kind,
            lambda value: (value.values, None),
            lambda _, values, built=built: built(values),
        )
