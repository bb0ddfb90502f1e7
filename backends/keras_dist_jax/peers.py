"""What a replica that is traced knows of replicas with other shapes."""

from collections.abc import Sequence
from typing import Any

import jax

# Of each value in a meeting: "tensor" with shape and dtype, "value" with a
# number or string, or "object" with nothing that could be compared.
Described = tuple[str, Any]
Record = list[list[Described]]


def describe(leaf: Any) -> Described:
    """What others have to know of a value, while nobody has its elements."""
    if isinstance(leaf, jax.Array):
        return "tensor", (tuple(leaf.shape), str(leaf.dtype))
    if isinstance(leaf, (bool, int, float, str)):
        return "value", leaf
    return "object", None


class Peers:
    """The variants of shapes that replicas have, and what each one meets for.

    Args:
        variant_of: Sequence with the variant of each replica.
        own: Integer, the variant that is traced.
        assumed: For each variant, what it met for when it was traced last;
            `None` to assume that all are like the one that is traced.

    Attributes:
        record: What it meets for.
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
        """Whether there is more than one variant."""
        return len(set(self._variant_of)) > 1

    def met(self, described: list[Described]) -> list[list[Described]]:
        """Notes a meeting; what each replica brings to it.

        Args:
            described: List of what this one brings.
        """
        index = len(self.record)
        self.record.append(described)

        def of(variant: int) -> list[Described]:
            if variant == self._own or self._assumed is None:
                return described
            others = self._assumed[variant]
            if index >= len(others) or len(others[index]) != len(described):
                return described  # they have diverged; that will be found
            return others[index]

        return [of(variant) for variant in self._variant_of]
