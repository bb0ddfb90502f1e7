"""Per-replica values that are one array over the mesh."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.values import PerReplica
from keras_dist_jax.layout import Layout


class Parts(tuple[Any, ...]):
    """Components that are the parts of one array with an axis for them."""

    stacked: Any = None


class JoinedPerReplica(PerReplica):
    """Components that are the parts of one array, cut along its first axis.

    Either is made of the other when it is asked for.

    Args:
        joined: `jax.Array` over the devices of `layout`, or a tracer; `None`
            to make it of `parts`.
        stacked: Boolean, whether that axis has a place for each replica that
            its component does not have. Else components are joined along it.
        layout: The `Layout`.
        parts: Sequence of `jax.Array`s, one for each replica.
    """

    _name = "PerReplica"

    def __init__(
        self,
        joined: Any,
        stacked: bool,
        layout: Layout,
        parts: Sequence[Any] | None = None,
    ) -> None:
        self.joined = joined
        self.stacked = stacked
        self._layout = layout
        self._parts = None if parts is None else tuple(parts)

    @property
    def kind(self) -> tuple[bool, Layout]:
        """What it is made with, beside the array."""
        return self.stacked, self._layout

    @property
    def values(self) -> tuple[Any, ...]:
        if self._parts is None:
            parts = Parts(parts_of(self.joined, self.stacked, self._layout))
            if self.stacked:
                parts.stacked = self.joined
            self._parts = parts
        return self._parts

    def join(self) -> bool:
        """Makes `joined`, of components of one shape and dtype.

        Returns:
            Whether they are that.
        """
        if self.joined is None:
            first, *others = parts = self.values
            if any(
                other.shape != first.shape or other.dtype != first.dtype
                for other in others
            ):
                return False
            self.stacked = first.ndim == 0
            placed = [
                jax.device_put(part, device)
                for part, device in zip(
                    parts, self._layout.devices, strict=True
                )
            ]
            self.joined = _join(placed, self.stacked, self._layout)
        return True


class Local(PerReplica):
    """A component of each replica, inside of a program that all of them run.

    Args:
        local: Tracer, the component of whoever runs the program.
        values: Sequence of tracers, all components; unused ones cost nothing.
    """

    def __init__(self, local: Any, values: Sequence[Any]) -> None:
        super().__init__(values)
        self.local = local


def parts_of(joined: Any, stacked: bool, layout: Layout) -> list[Any]:
    """What each replica has of an array that is cut over them."""
    count = len(layout.devices)
    if isinstance(joined, jax.core.Tracer):
        if not stacked:
            joined = joined.reshape(count, -1, *joined.shape[1:])
        return [joined[index] for index in range(count)]
    held = {shard.device: shard.data for shard in joined.addressable_shards}
    parts = [held[device] for device in layout.devices]
    return [jax.lax.squeeze(p, (0,)) for p in parts] if stacked else parts


def stacked_of(values: Sequence[Any], layout: Layout) -> Any:
    """Tensors of each replica as one array with an axis for replicas."""
    placed = [
        jax.device_put(value, device)
        for value, device in zip(values, layout.devices, strict=True)
    ]
    return _join(placed, True, layout)


def over_replicas(layout: Layout) -> NamedSharding:
    """The sharding of an array that is cut over the replicas."""
    return NamedSharding(layout.sharding.mesh, PartitionSpec("replica"))


def _join(placed: list[Any], stacked: bool, layout: Layout) -> Any:
    if stacked:
        placed = [jax.lax.expand_dims(value, (0,)) for value in placed]
    shape = placed[0].shape
    return jax.make_array_from_single_device_arrays(
        (shape[0] * len(placed), *shape[1:]), over_replicas(layout), placed
    )
