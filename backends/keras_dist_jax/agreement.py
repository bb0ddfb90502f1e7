"""Checks that replicas end with equal values, and means of different ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp

from keras_dist.core.nests import always
from keras_dist.core.nests import regroup
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.keras_random import is_seed
from keras_dist.plugin.replica import divergence
from keras_dist_jax.jaxprs import AXIS
from keras_dist_jax.layout import Shapes


class Result:
    """A placeholder for an array in a replica function's result."""

    shapes: Shapes | None = None

    def __init__(self, value: Any) -> None:
        self.kind = str(value.dtype), value.ndim

    def __repr__(self) -> str:
        dtype, ndim = self.kind
        return f"<a {dtype} tensor of rank {ndim}>"


def means_of(
    variables: Sequence[keras.Variable], differ: Sequence[bool]
) -> list[bool]:
    """Tells for each variable whether replicas average its new values."""
    means = []
    for variable, differs in zip(variables, differ, strict=True):
        dtype = keras.backend.standardize_dtype(variable.dtype)
        # All replicas draw equally often from a seed generator, so that its
        # state stays equal.
        is_mean = differs and not is_seed(variable)
        if is_mean and (variable.trainable or "float" not in dtype):
            raise ReplicaDivergenceError(
                "Replicas may leave different values in variable "
                f"'{variable.path}', whose aggregation is "
                f"'{variable.aggregation}', because the values depend on each "
                "replica's own data. Expected: the same value on each "
                "replica. Make the variable with `aggregation='mean'`, 'sum' "
                "or 'only_first_replica', or with "
                "`synchronization='on_read'` to keep a separate value on "
                "each replica."
            )
        means.append(is_mean)
    return means


def _check_outlines(outlines: Sequence[Any]) -> None:
    """Compares the results of all variants, except the elements of arrays."""
    for other in outlines[1:]:
        try:
            regroup([outlines[0], other], _check_leaves, always)
        except ValueError:
            raise ReplicaDivergenceError(
                "Replicas with different numbers of rows returned different "
                f"things. Received: {outlines[0]!r} and {other!r}. Expected: "
                "the same lists, tuples and keys on each replica, tensors of "
                "the same dtype and rank, and equal values for everything "
                "that is neither a tensor nor a number. Look for Python code "
                "that branches on shapes."
            ) from None


def _check_leaves(leaves: Sequence[Any]) -> None:
    first, other = leaves
    if isinstance(first, Result) and isinstance(other, Result):
        same = first.kind == other.kind
    elif isinstance(first, Result) or isinstance(other, Result):
        same = False
    else:
        same = bool(first is other or first == other)
    if not same:
        raise ValueError


def in_order(nest: Any, like: Any) -> Any:
    """Gives mappings in a nest the order of their keys in another one."""
    try:
        return regroup([like, nest], lambda leaves: leaves[1], always)
    except ValueError:  # `_check_outlines` says so
        return nest


def averaged(values: list[Any], differ: Sequence[bool]) -> list[Any]:
    """Replaces the values that may differ by their means over all replicas."""
    own = [v for v, differs in zip(values, differ, strict=True) if differs]
    means = iter(lax.pmean(own, AXIS) if own else [])
    return [
        next(means) if differs else value
        for value, differs in zip(values, differ, strict=True)
    ]


def given(
    each: Sequence[Any], whole: list[Any], differ: Sequence[bool]
) -> tuple[list[Any], list[Any]]:
    """Returns what a region gives: each replica's own values, with an axis for
    replicas, and values that all replicas share."""
    return [jnp.asarray(x)[None] for x in each], averaged(whole, differ)


class OwnList(list[Any]):
    """A list that a rendezvous does not gather: it is a leaf to `jax.tree`."""


class OwnWrites(dict[int, tuple[Any, Any]]):
    """Assignments that a rendezvous does not gather, like `OwnList`."""


# One value of a rendezvous: "tensor" with shape and dtype, "value" with a
# number or string, or "object" without a description.
Described = tuple[str, Any]
# For each rendezvous: the structure of its values, and each value.
Record = list[tuple[Any, list[Described]]]


def as_tensor(leaf: Any) -> Any:
    """Makes a tensor of a host array; elements may differ between replicas."""
    if isinstance(leaf, float) or not isinstance(
        leaf, (np.ndarray, np.generic)
    ):
        return leaf
    return jnp.asarray(leaf)


def describe(leaf: Any) -> Described:
    """Describes a value to the other replicas, without its elements."""
    if isinstance(leaf, jax.Array):
        return "tensor", (tuple(leaf.shape), str(leaf.dtype))
    if isinstance(leaf, (bool, int, float, str)):
        return "value", leaf
    return "object", type(leaf)


@dataclasses.dataclass(eq=False)
class Peers:
    """The variants of shapes that replicas have, and their rendezvous."""

    variant_of: list[int]  # of each replica
    own: int = 0  # the variant that is traced
    # The record of each variant from the trace before; `None` assumes that all
    # are like the one that is traced.
    assumed: Sequence[Record] | None = None
    record: Record = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)

    @property
    def are_uneven(self) -> bool:
        """`True` if there is more than one variant."""
        return len(set(self.variant_of)) > 1

    def met(
        self, described: list[Described], structure: Any
    ) -> list[list[Described]]:
        """Records a rendezvous; returns the values that each replica brings."""
        index = len(self.record)
        self.record.append((structure, described))

        def of(variant: int) -> list[Described]:
            if variant == self.own or self.assumed is None:
                return described
            record = self.assumed[variant]
            if len(record) != len(self.assumed[self.own]):
                # They diverged, which is found later; or JAX had traced a
                # function of the user's before, which met then.
                return described
            theirs, others = record[index]
            if theirs != structure or any(
                _kind(a) != _kind(b)
                for a, b in zip(others, described, strict=True)
            ):
                raise ReplicaDivergenceError(
                    "Replicas with different numbers of rows gave a "
                    "collective values of different structures. Received: "
                    f"{described} in {structure} and {others} in {theirs}. "
                    "Expected: the same lists, tuples and keys on each "
                    "replica, with tensors in the same places. Look for "
                    "Python code that branches on shapes."
                )
            return others

        return [of(variant) for variant in self.variant_of]


def _kind(described: Described) -> Any:
    """Returns the kind of a value; of an object, its type."""
    kind, _ = described
    return described if kind == "object" else kind


@dataclasses.dataclass(frozen=True)
class VariantTrace:
    """A trace for the replicas whose arguments have the same shapes."""

    program: Any
    structure: Any
    outline: Any
    written: list[keras.Variable]
    peers: Peers


def check_alike(variants: Sequence[VariantTrace]) -> None:
    """Compares what variants returned, met for and assigned."""
    _check_outlines([variant.outline for variant in variants])
    places = [variant.peers.places for variant in variants]
    # What JAX has traced before, in a `jax.jit` of the user's for instance, has
    # its collectives again, and leaves no place.
    if len(set(map(len, places))) == 1:
        for meeting in zip(*places, strict=True):
            if len(set(meeting)) > 1:
                variant_of = variants[0].peers.variant_of
                raise divergence([meeting[index] for index in variant_of])
    written = [[id(v) for v in variant.written] for variant in variants]
    if any(each != written[0] for each in written):
        raise ReplicaDivergenceError(
            "Replicas with different numbers of rows assigned different "
            "variables. Expected: each replica assigns the same variables in "
            "the same order. Look for Python code that branches on shapes."
        )
