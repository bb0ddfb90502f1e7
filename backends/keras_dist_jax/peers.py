"""Facts about replicas with other shapes, while one replica is traced."""

from collections.abc import Sequence
from typing import Any

import jax

# One value of a rendezvous: "tensor" with shape and dtype, "value" with a
# number or string, or "object" without a description.
Described = tuple[str, Any]
Record = list[list[Described]]


def describe(leaf: Any) -> Described:
    """Describes a value to the other replicas, without its elements."""
    if isinstance(leaf, jax.Array):
        return "tensor", (tuple(leaf.shape), str(leaf.dtype))
    if isinstance(leaf, (bool, int, float, str)):
        return "value", leaf
    return "object", None


class Peers:
    """The variants of shapes that replicas have, and their rendezvous.

    Args:
        variant_of: Sequence with the variant of each replica.
        own: Integer, the variant that is traced.
        assumed: The record of each variant from the trace before; `None` to
            assume that all are like the one that is traced.

    Attributes:
        record: List of the values of each rendezvous in this trace.
    """

    def __init__(
        self,
        variant_of: Sequence[int],
        own: int = 0,
        assumed: Sequence[Record] | None = None,
    ) -> None:
        self._variant_of = variant_of
        self._own = own
        self._assumed = assumed
        self.record: Record = []

    @property
    def are_uneven(self) -> bool:
        """`True` if there is more than one variant."""
        return len(set(self._variant_of)) > 1

    def met(self, described: list[Described]) -> list[list[Described]]:
        """Records a rendezvous; returns the values that each replica brings.

        `described` has the values of the replica that is traced.
        """
        index = len(self.record)
        self.record.append(described)

        def of(variant: int) -> list[Described]:
            if variant == self._own or self._assumed is None:
                return described
            others = self._assumed[variant]
            if index >= len(others) or len(others[index]) != len(described):
                return described  # diverged, which is found later
            return others[index]

        return [of(variant) for variant in self._variant_of]
