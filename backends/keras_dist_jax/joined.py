"""Per-replica values that are one array over the mesh."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import Shapes
from keras_dist_jax.machine import is_described


class JoinedPerReplica(PerReplica):
    """A per-replica value with components that are shards of one array."""

    # `joined` is an array over the layout's devices, split along its first
    # axis, or a tracer; it is `None` until it is made of `parts`. If `stacked`,
    # the first axis is for replicas; else components are concatenated along it.
    # `shapes` are the components' where they differ: then they are padded to
    # one shape.

    def __init__(
        self,
        joined: Any,
        stacked: bool,
        layout: Layout,
        parts: Sequence[Any] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        self.joined = joined
        self.shapes = shapes
        self.stacked = stacked
        self.layout = layout
        self._parts = None if parts is None else tuple(parts)

    @property
    def values(self) -> tuple[Any, ...]:
        if self._parts is None:
            parts = parts_of(self.joined, self.stacked, self.layout)
            if self.shapes is not None:
                is_traced = len(parts) > len(self.layout.devices)
                own = self.shapes[0 if is_traced else self.layout.first :]
                parts = list(map(cut_to, parts, own))
            self._parts = tuple(parts)
        return self._parts

    @classmethod
    def of_traced(
        cls, values: Sequence[Any], layout: Layout
    ) -> "JoinedPerReplica":
        """Stacks components inside of a program."""
        parts = [jnp.asarray(value) for value in values]
        shapes = tuple(tuple(part.shape) for part in parts)
        if len(set(shapes)) > 1:
            parts = [padded(part, largest(shapes)) for part in parts]
            return cls(jnp.stack(parts), True, layout, None, shapes)
        return cls(jnp.stack(parts), True, layout)

    def in_a_program(self) -> "JoinedPerReplica":
        """Returns the same value, joined, while a function is traced."""
        if self.joined is not None:
            return self
        if any(isinstance(part, jax.core.Tracer) for part in self.values):
            return self.of_traced(self.values, self.layout)
        with jax.ensure_compile_time_eval():
            self.join()
        return self

    def join(self, everyones: Shapes | None = None) -> None:
        """Sets `joined` to an array made of the components."""
        if self.joined is not None:
            return
        parts = self.values
        shapes = tuple(tuple(part.shape) for part in parts)
        if len({(len(p.shape), p.dtype) for p in parts}) > 1:
            raise ValueError(
                "All components of a per-replica value go into one program. "
                f"Received: {[jax.typeof(p).str_short() for p in parts]}. "
                "Expected: the same dtype and the same number of axes in "
                "each."
            )
        if self.layout.is_wide:
            shapes = everyones or self.layout.everyones([shapes])[0]
        if len(set(shapes)) > 1:
            self.shapes, self.stacked = shapes, True
            parts = tuple(padded(part, largest(shapes)) for part in parts)
        else:
            self.stacked = not shapes[0]
        self.joined = join(parts, self.stacked, self.layout)


def largest(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the smallest shape that all others fit in."""
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def padded(value: Any, shape: Sequence[int]) -> Any:
    """Pads a value with zeros behind its ends."""
    missing = [(0, s - n) for s, n in zip(shape, value.shape, strict=True)]
    return jnp.pad(value, missing) if any(m for _, m in missing) else value


def cut_to(value: Any, shape: Sequence[int]) -> Any:
    """Removes the padding of `padded`."""
    if tuple(value.shape) == tuple(shape):
        return value
    return value[tuple(slice(size) for size in shape)]


class Local(PerReplica):
    """A per-replica value in a region, and this replica's own component."""

    def __init__(self, local: Any, values: Sequence[Any]) -> None:
        super().__init__(values)
        self.local = local


def parts_of(joined: Any, stacked: bool, layout: Layout) -> list[Any]:
    """Returns the components of an array that is cut over the replicas."""
    count = layout.num_replicas
    if isinstance(joined, jax.core.Tracer):
        if not stacked:
            joined = joined.reshape(count, -1, *joined.shape[1:])
        return [joined[index] for index in range(count)]
    if is_described(joined):
        first = () if stacked else (joined.shape[0] // count,)
        part = jax.ShapeDtypeStruct((*first, *joined.shape[1:]), joined.dtype)
        return [part] * len(layout.devices)
    held = {shard.device: shard.data for shard in joined.addressable_shards}
    parts = [held[device] for device in layout.devices]
    return [jax.lax.squeeze(p, (0,)) for p in parts] if stacked else parts


def join(values: Sequence[Any], stacked: bool, layout: Layout) -> Any:
    """Joins the tensors of replicas, `stacked` along a new axis for them."""
    if any(map(is_described, values)):
        shape = (1, *values[0].shape) if stacked else values[0].shape
        return jax.ShapeDtypeStruct(
            (shape[0] * layout.num_replicas, *shape[1:]),
            values[0].dtype,
            sharding=layout.cut,
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
        layout.cut,
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
