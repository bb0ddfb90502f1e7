"""Facts about replicas with other shapes, while one replica is traced."""

from collections.abc import Sequence
from typing import Any

import jax

from keras_dist.errors import ReplicaDivergenceError

# One value of a rendezvous: "tensor" with shape and dtype, "value" with a
# number or string, or "object" without a description.
Described = tuple[str, Any]
# Of each rendezvous: the structure of its values, and each value.
Record = list[tuple[Any, list[Described]]]


def describe(leaf: Any) -> Described:
    """Describes a value to the other replicas, without its elements."""
    if isinstance(leaf, jax.Array):
        return "tensor", (tuple(leaf.shape), str(leaf.dtype))
    if isinstance(leaf, (bool, int, float, str)):
        return "value", leaf
    return "object", type(leaf)


class Peers:
    """The variants of shapes that replicas have, and their rendezvous.

    Args:
        variant_of: Sequence with the variant of each replica.
        own: Integer, the variant that is traced.
        assumed: The record of each variant from the trace before; `None` to
            assume that all are like the one that is traced.

    Attributes:
        record: List of the values of each rendezvous in this trace.
        places: List of the names of what replicas met for.
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
        self.places: list[str] = []

    @property
    def are_uneven(self) -> bool:
        """`True` if there is more than one variant."""
        return len(set(self._variant_of)) > 1

    def met(
        self, described: list[Described], structure: Any
    ) -> list[list[Described]]:
        """Records a rendezvous; returns the values that each replica brings.

        `described` has the values of the replica that is traced, and
        `structure` is that of the nest that they are from.

        Raises:
            ReplicaDivergenceError: If another variant brings another structure,
                or a tensor where this one brings something else.
        """
        index = len(self.record)
        self.record.append((structure, described))

        def of(variant: int) -> list[Described]:
            if variant == self._own or self._assumed is None:
                return described
            record = self._assumed[variant]
            if len(record) != len(self._assumed[self._own]):
                # They diverged, which is found later; or JAX had traced a
                # function of the user's before, which met then.
                return described
            theirs, others = record[index]
            if theirs != structure or any(
                _kind(a) != _kind(b)
                for a, b in zip(others, described, strict=True)
            ):
                raise ReplicaDivergenceError(
                    "Replicas with different numbers of rows met with "
                    f"different things. Received: {described} in {structure} "
                    f"and {others} in {theirs}. Expected: the same lists, "
                    "tuples and keys on each replica, with tensors in the same "
                    "places. Look for a branch on shapes."
                )
            return others

        return [of(variant) for variant in self._variant_of]


def _kind(described: Described) -> Any:
    """Returns the kind of a value; of an object, its type."""
    kind, _ = described
    return described if kind == "object" else kind
