"""Packing: many values in few flat ones, for one operation on each pack."""

import itertools
import math
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any


def packs(
    kinds: Sequence[Hashable],
    sizes: Sequence[int] | None = None,
    limit: float = math.inf,
    last_first: bool = False,
) -> list[list[int]]:
    """Groups indices of values of one kind, of sizes up to `limit` together."""
    groups: list[list[int]] = []
    # By kind, the pack that is being filled, and its size.
    filling: dict[Hashable, tuple[list[int], int]] = {}
    indices = range(len(kinds))
    for index in reversed(indices) if last_first else indices:
        size = sizes[index] if sizes else 0
        pack, filled = filling.get(kinds[index], ([], 0))
        if not pack or filled + size > limit:
            pack, filled = [], 0
            groups.append(pack)
        pack.append(index)
        filling[kinds[index]] = pack, filled + size
    return groups


def in_packs(
    fn: Callable[[list[Any]], Sequence[Any]],
    packs: Iterable[Sequence[int]],
    values: Sequence[Any],
) -> list[Any]:
    """Calls `fn` with each pack of values; the others stay as they are."""
    results = list(values)
    for pack in packs:
        new_values = fn([values[index] for index in pack])
        for index, result in zip(pack, new_values, strict=True):
            results[index] = result
    return results


def places(sizes: Sequence[Any]) -> list[slice]:
    """Returns the slice of each value in the concatenation of all."""
    edges = itertools.accumulate(sizes, initial=0)
    return [slice(*pair) for pair in itertools.pairwise(edges)]
