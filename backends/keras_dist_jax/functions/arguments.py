"""Arrays among the arguments of a replica function."""

import dataclasses
from typing import Any

import jax

from keras_dist.plugins import PerReplica
from keras_dist.plugins import map_nest
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.per_replica import JoinedPerReplica


@dataclasses.dataclass(frozen=True)
class Argument:
    """A placeholder for an array among the arguments of a replica function."""

    is_sharded: bool
    stacked: bool = False

    def of_replica(self, value: Any) -> Any:
        """Returns a replica's argument, given the part that its device has."""
        return value[0] if self.stacked else value


def held_arrays(
    nest: object, layout: Layout
) -> tuple[Any, list[Argument], list[Any]]:
    """Returns the nest with placeholders, the placeholders, and the arrays."""
    leaves: list[Any] = []
    placeholders: list[Argument] = []

    def hold(leaf: object) -> Any:
        if isinstance(leaf, jax.Array):
            leaves.append(leaf)
            placeholders.append(Argument(False))
        elif isinstance(leaf, PerReplica):
            if isinstance(leaf, JoinedPerReplica):
                leaf = leaf.in_a_program()
            else:
                leaf = JoinedPerReplica.of_traced(leaf.values, layout)
            leaves.append(leaf.joined)
            placeholders.append(Argument(True, leaf.stacked))
        else:
            return leaf
        return placeholders[-1]

    return map_nest(hold, nest), placeholders, leaves
