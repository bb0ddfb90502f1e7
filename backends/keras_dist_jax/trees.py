"""Registration of per-replica values as pytrees of their components."""

from typing import Any

import jax

from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica
from keras_dist_jax.joined import JoinedPerReplica


def register() -> None:
    """Makes `jax.tree` look into per-replica values."""
    for kind in (PerReplica, Mirrored):
        jax.tree_util.register_pytree_node(kind, _flatten, _builder(kind))
    jax.tree_util.register_pytree_node(
        JoinedPerReplica, _flatten, _builder(PerReplica)
    )


def _flatten(value: Any) -> tuple[tuple[Any, ...], None]:
    return value.values, None


def _builder(kind: Any) -> Any:
    def build(_: None, values: Any) -> Any:
        return kind(values)

    return build
