"""What a compiled function returns, on its way out of a program.

A program gives a flat list of arrays. What they were in is kept beside it: a
nest that Python had to rebuild would let an interrupt in, after the program has
run and before anybody has its arrays.
"""

from typing import Any

import jax
import keras
import numpy as np

from keras_dist.core.objects import held_in
from keras_dist.core.objects import refuse_result
from keras_dist.core.regroup import leaves_of
from keras_dist.core.regroup import map_nest
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.joined import over_replicas
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import Shapes

ARRAY_TYPES = (jax.Array, np.ndarray, np.generic)


class ArrayMark:
    """Stands for an array."""


class Joined:
    """Stands for a per-replica value.

    Args:
        stacked: Boolean, as of a `JoinedPerReplica`.
        shapes: Shapes or `None`, likewise.
        layout: The `Layout`.
    """

    def __init__(
        self, stacked: bool, shapes: Shapes | None, layout: Layout
    ) -> None:
        self.stacked = stacked
        self.shapes = shapes
        self.layout = layout


ARRAY = ArrayMark()


def packed(nest: Any) -> tuple[list[Any], Any]:
    """A result as a program gives it.

    Returns:
        Tuple of a list of arrays and of the outline: the nest with what
        stands for them.

    Raises:
        TraceError: If a tensor is hidden in some object.
    """
    arrays: list[Any] = []

    def pack(leaf: Any) -> Any:
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        if isinstance(leaf, JoinedPerReplica):
            leaf = leaf.in_a_program()
            sharding = over_replicas(leaf.layout)
            arrays.append(
                jax.lax.with_sharding_constraint(leaf.joined, sharding)
            )
            return Joined(leaf.stacked, leaf.shapes, leaf.layout)
        if isinstance(leaf, ARRAY_TYPES):
            arrays.append(leaf)
            return ARRAY
        check_constant(leaf)
        return leaf

    return arrays, map_nest(pack, nest)


def marks_of(outline: Any) -> list[Any]:
    """What stands for each array of an outline, in order."""
    return [
        leaf
        for leaf in leaves_of(outline)
        if leaf is ARRAY or isinstance(leaf, Joined)
    ]


def unpacked(outline: Any, arrays: list[Any]) -> Any:
    """The result again, once it is out.

    Args:
        outline: What `packed` made of the nest.
        arrays: What the program gave.
    """
    # The most usual ones, without more calls than needed.
    if outline.__class__ is Joined:
        return JoinedPerReplica(
            arrays[0], outline.stacked, outline.layout, None, outline.shapes
        )
    if outline is ARRAY:
        return arrays[0]
    rest = iter(arrays)

    def unpack(leaf: Any) -> Any:
        if leaf is ARRAY:
            return next(rest)
        if leaf.__class__ is Joined:
            return unpacked(leaf, [next(rest)])
        return leaf

    return map_nest(unpack, outline)


def check_constant(value: Any) -> None:
    """Refuses an object that takes a tensor out of its trace.

    Raises:
        TraceError: If there is one in its attributes or closure.
    """
    if any(isinstance(each, jax.core.Tracer) for each in held_in(value)):
        refuse_result(value)
