"""What a compiled function returns, on its way out of a program."""

from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.regroup import map_nest
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.joined import Shapes
from keras_dist_jax.joined import over_replicas
from keras_dist_jax.layout import Layout


@dataclass(slots=True)
class Packed:
    """A per-replica value among the results of a program."""

    joined: Any
    stacked: bool
    shapes: Shapes | None
    layout: Layout


@dataclass(slots=True)
class Constant:
    """A result that is no tensor."""

    holder: "_Holder"


@dataclass(slots=True, eq=False)
class _Holder:
    """Any object, compared by identity."""

    value: Any


# In C, and with nothing but arrays and these in the results.
jax.tree_util.register_dataclass(
    Packed, ["joined"], ["stacked", "shapes", "layout"]
)
jax.tree_util.register_dataclass(Constant, [], ["holder"])


def packed(nest: Any) -> tuple[Any, bool]:
    """A result as JAX can return it.

    Returns:
        Tuple of the nest, and whether it needs to be `unpacked`.
    """
    plain = True

    def pack(leaf: Any) -> Any:
        nonlocal plain
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        if leaf is None or isinstance(
            leaf, (jax.Array, np.ndarray, np.generic)
        ):
            return leaf
        plain = False
        if isinstance(leaf, JoinedPerReplica):
            joined = jax.lax.with_sharding_constraint(
                leaf.joined, over_replicas(leaf.layout)
            )
            return Packed(joined, leaf.stacked, leaf.shapes, leaf.layout)
        return Constant(_Holder(leaf))

    result = map_nest(pack, nest)
    return result, plain


def unpacked(nest: Any) -> Any:
    """The result again, once it is out.

    Args:
        nest: What the program returned.
    """

    def unpack(leaf: Any) -> Any:
        if leaf.__class__ is Packed:
            return JoinedPerReplica(
                leaf.joined, leaf.stacked, leaf.layout, None, leaf.shapes
            )
        if leaf.__class__ is Constant:
            return leaf.holder.value
        return leaf

    return map_nest(unpack, nest)
