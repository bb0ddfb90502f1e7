"""Results of compiled functions, as flat lists of arrays with an outline.

A program gives a flat list of arrays, and the nest that they come from is kept
beside it. If Python had to rebuild a nest to receive them, an interrupt could
come after the program has run and before its arrays are kept.
"""

from typing import Any

import jax
import keras
import numpy as np

from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.objects import held_in
from keras_dist.core.objects import refuse_result
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.joined import over_replicas
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import Shapes

ARRAY_TYPES = (jax.Array, np.ndarray, np.generic)


class ArrayMark:
    """The type of `ARRAY`, the placeholder for an array in an outline."""


class Joined:
    """A placeholder for a `JoinedPerReplica` in an outline."""

    def __init__(
        self, stacked: bool, shapes: Shapes | None, layout: Layout
    ) -> None:
        self.stacked = stacked
        self.shapes = shapes
        self.layout = layout


ARRAY = ArrayMark()


def packed(nest: Any) -> tuple[list[Any], Any]:
    """Splits a result into the arrays that a program gives and an outline.

    Returns:
        Tuple of the list of arrays and of the outline: the nest, with
        placeholders for arrays.

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
    """Returns the placeholder of each array of an outline, in order."""
    return [
        leaf
        for leaf in leaves_of(outline)
        if leaf is ARRAY or isinstance(leaf, Joined)
    ]


def unpacked(outline: Any, arrays: list[Any]) -> Any:
    """Rebuilds a result from the outline and the program's arrays."""
    # The most common results, without the calls of `map_nest`.
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
    """Checks that an object takes no tensor out of its trace.

    Raises:
        TraceError: If its attributes or closure hold one.
    """
    if any(isinstance(each, jax.core.Tracer) for each in held_in(value)):
        refuse_result(value)
