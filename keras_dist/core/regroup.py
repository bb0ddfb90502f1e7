"""From values of each replica to one nest of per-replica values, and back."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras_dist.core.components import VariableComponent
from keras_dist.core.values import Mirrored
from keras_dist.core.values import PerReplica


def map_nest(fn: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with `fn` applied to each leaf.

    Lists, tuples, named tuples and mappings are nests, of any type; that type
    is kept. Anything else is a leaf.
    """
    if isinstance(nest, Mapping):
        return _mapping_like(nest, {k: map_nest(fn, nest[k]) for k in nest})
    if isinstance(nest, (list, tuple)):
        return _sequence_like(nest, [map_nest(fn, item) for item in nest])
    return fn(nest)


def like(nest: Any, items: Mapping[Any, Any]) -> Any:
    """Makes a list, tuple or mapping as a nest is, of other items.

    Args:
        nest: The outermost list, tuple or mapping of a nest.
        items: Mapping from its indices or keys to the items.
    """
    if isinstance(nest, Mapping):
        return _mapping_like(nest, {key: items[key] for key in nest})
    return _sequence_like(nest, [items[i] for i in range(len(nest))])


def leaves_of(nest: Any) -> list[Any]:
    """The leaves of a nest, in order."""
    leaves: list[Any] = []
    map_nest(leaves.append, nest)
    return leaves


def select(index: int, nest: Any) -> Any:
    """One replica's view of a nest: its own component of each value."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, (PerReplica, Mirrored)):
            return leaf.values[index]
        return leaf

    return map_nest(own, nest)


def check_counts(nest: Any, num_replicas: int) -> None:
    """Refuses per-replica values of another number of replicas.

    Raises:
        ValueError: If there is one.
    """

    def check(leaf: Any) -> None:
        is_value = isinstance(leaf, (PerReplica, Mirrored))
        if is_value and len(leaf.values) != num_replicas:
            raise ValueError(
                "A per-replica value must have a component for each replica. "
                f"Received: {len(leaf.values)} components in {leaf!r}. "
                f"Expected: {num_replicas}. It may come from another strategy."
            )

    map_nest(check, nest)


def _never(leaf: Any) -> bool:
    return False


def _as_it_is(leaf: Any, index: int) -> Any:
    return leaf


def regroup(
    nests: Sequence[Any],
    wrap: Callable[[Sequence[Any]], Any] = PerReplica,
    always: Callable[[Any], bool] = _never,
    own: Callable[[Any, int], Any] = _as_it_is,
) -> Any:
    """Joins the nests of all replicas, leaf by leaf.

    Args:
        nests: Sequence of nests of one structure, in replica order.
        wrap: Callable from the components of a leaf to the joined leaf.
        always: Callable that tells whether a leaf that is the same object on
            each replica is wrapped too, rather than given as it is; and the
            components of a variable, rather than given as the variable.
        own: Callable from a leaf and a replica's index to what that replica
            contributes.

    Returns:
        A nest of that structure. With one replica, its nest.

    Raises:
        ValueError: If replicas have nests of different structures.
    """
    if len(nests) == 1:
        return _of_one(nests[0], own)

    def join(leaves: list[Any]) -> Any:
        first = leaves[0]
        if not always(first):
            if all(leaf is first for leaf in leaves):
                return first
            variable = _variable_of(leaves)
            if variable is not None:
                return variable
        return wrap([own(leaf, index) for index, leaf in enumerate(leaves)])

    return _regroup(list(nests), join, "result")


def always(leaf: Any) -> bool:
    """For `regroup`: every leaf is wrapped."""
    return True


def _of_one(nest: Any, own: Callable[[Any, int], Any]) -> Any:
    """A nest with `own` applied; the same object where that changes nothing."""
    before = leaves_of(nest)
    after = [own(leaf, 0) for leaf in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return nest
    leaves = iter(after)
    return map_nest(lambda _: next(leaves), nest)


def _regroup(
    nests: list[Any], join: Callable[[list[Any]], Any], path: str
) -> Any:
    first = nests[0]
    for index, nest in enumerate(nests):
        if _shape(nest) != _shape(first):
            raise ValueError(
                "Replicas returned different structures. Received at "
                f"`{path}`: {_described(first)} from replica 0, "
                f"{_described(nest)} from replica {index}. Expected: the same "
                "lists, tuples and keys on each replica."
            )

    def joined(key: Any) -> Any:
        parts = [nest[key] for nest in nests]
        return _regroup(parts, join, f"{path}[{key!r}]")

    if isinstance(first, Mapping):
        return _mapping_like(first, {key: joined(key) for key in first})
    if isinstance(first, (list, tuple)):
        return _sequence_like(first, [joined(i) for i in range(len(first))])
    return join(nests)


def _variable_of(leaves: list[Any]) -> Any:
    """The variable whose components, in order, these are; or `None`."""
    if not isinstance(leaves[0], VariableComponent):
        return None
    container = leaves[0].container
    for index, leaf in enumerate(leaves):
        if not (
            isinstance(leaf, VariableComponent)
            and leaf.container is container
            and leaf.index == index
        ):
            return None
    return container


def _shape(nest: Any) -> Any:
    """What has to be equal for two nests to have one structure, at the top."""
    if isinstance(nest, Mapping):
        return Mapping, set(nest)
    if isinstance(nest, (list, tuple)):
        return type(nest), len(nest)
    return None


def _described(nest: Any) -> str:
    if isinstance(nest, Mapping):
        return f"{type(nest).__name__} with keys {sorted(map(str, nest))}"
    if isinstance(nest, (list, tuple)):
        return f"{type(nest).__name__} of length {len(nest)}"
    return f"a {type(nest).__name__}"


def _sequence_like(nest: Any, items: list[Any]) -> Any:
    if hasattr(nest, "_fields"):  # a named tuple
        return type(nest)(*items)
    return type(nest)(items)


def _mapping_like(nest: Any, items: dict[Any, Any]) -> Any:
    if type(nest) is dict:
        return items
    default_factory = getattr(nest, "default_factory", None)
    if default_factory is not None:
        return type(nest)(default_factory, items)
    return type(nest)(items)
