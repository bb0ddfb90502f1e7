"""The one door to PyTorch's private names.

| name | why |
|---|---|
| `torch.utils._pytree` | treats per-replica values as nests of components |
"""

from typing import Any

from torch.utils import _pytree

from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica


def register_trees() -> None:
    """Registers per-replica values as nests with PyTorch's pytrees."""
    for kind in (PerReplica, Mirrored):
        _pytree.register_pytree_node(
            kind,
            _flatten,
            _builder(kind),
            serialized_type_name=f"keras_dist.{kind.__name__}",
        )


def _flatten(value: Any) -> tuple[list[Any], None]:
    return list(value.values), None


def _builder(kind: Any) -> Any:
    def build(values: Any, _: None) -> Any:
        return kind(values)

    return build
