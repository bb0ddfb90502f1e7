"""What a compiled function returns, on its way out of a program."""

from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.regroup import map_nest
from keras_dist.values import PerReplica
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.joined import Shapes
from keras_dist_jax.layout import Layout


@dataclass(slots=True)
class Packed:
    """A per-replica value among the results of a program."""

    joined: Any
    stacked: bool
    shapes: Shapes | None = None

    def on(self, layout: Layout) -> JoinedPerReplica:
        """The per-replica value again."""
        return JoinedPerReplica(
            self.joined, self.stacked, layout, None, self.shapes
        )


@dataclass(slots=True)
class Constant:
    """A result that is no tensor."""

    holder: "_Holder"


@dataclass(slots=True, eq=False)
class _Holder:
    """Any object, compared by identity."""

    value: Any


# In C, and with nothing but arrays and these in the results.
jax.tree_util.register_dataclass(Packed, ["joined"], ["stacked", "shapes"])
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
            leaf, (jax.Array, np.ndarray, np.generic, int, float)
        ):
            return leaf
        plain = False
        if isinstance(leaf, JoinedPerReplica):
            return Packed(leaf.joined, leaf.stacked, leaf.shapes)
        if isinstance(leaf, PerReplica):
            return Packed(jax.numpy.stack(leaf.values), True)
        return Constant(_Holder(leaf))

    result = map_nest(pack, nest)
    return result, plain


def unpacked(nest: Any, layout: Layout | None) -> Any:
    """The result again, once it is out.

    Args:
        nest: What the program returned.
        layout: The `Layout` of per-replica values, where there are some.
    """

    def unpack(leaf: Any) -> Any:
        if leaf.__class__ is Packed and layout is not None:
            return leaf.on(layout)
        if leaf.__class__ is Constant:
            return leaf.holder.value
        return leaf

    return map_nest(unpack, nest)
