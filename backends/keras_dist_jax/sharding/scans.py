"""Layers in a scan: each step of it gathers its own slice of a variable.

A layer that reads a sharded variable gets the parts of all replicas. If it
gives that value to a scan, with an axis for the steps in front, all slices
would be there at once.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from keras_dist.plugins import HOOKS
from keras_dist.plugins import Hook
from keras_dist.plugins import Hooks
from keras_dist.plugins import replaced
from keras_dist_jax.jax_internals import tracing_with
from keras_dist_jax.programs import jaxprs
from keras_dist_jax.sharding.shards import Shards

_GATHERED = "keras_dist_gathered"
_checkpoint = jax.checkpoint  # imported before any hook is in place


class _Reads(threading.local):
    # By the id of a value that was gathered in the step that is traced: the
    # value, the same in parts, and how these are sharded.
    noted: dict[int, tuple[Any, Any, Shards]] | None = None
    # Whether a step of a scan is traced, or what `jax.checkpoint` is given.
    in_scan = in_checkpoint = False


_reads = _Reads()


def noting() -> Any:
    """Returns the context in which gathered values are known to scans."""
    return replaced(_reads, noted={})


def note(gathered: object, parts: object, division: Shards) -> Any:
    """Notes that a value was gathered from parts; returns the value."""
    if _reads.noted is not None:
        _reads.noted[id(gathered)] = gathered, parts, division
    return gathered


def at_read(value: object) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which to gather a value.

    In a scan, that is around the scan: each step would gather, and scatter the
    gradient.
    """
    return tracing_with(value) if _reads.in_scan else contextlib.nullcontext()


def gathers_again() -> bool:
    """Tells whether what is traced is computed again in the backward pass."""
    return _reads.in_checkpoint and not _reads.in_scan


def hook_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `jax.checkpoint`, which Keras calls too."""

    @functools.wraps(original)
    def checkpointed(fun: Callable[..., Any], **options: Any) -> Any:
        return original(_within(fun, in_checkpoint=True), **options)

    return checkpointed


def hook_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `jax.lax.scan`, which Keras calls too."""

    @functools.wraps(original)
    def scan(
        f: Callable[..., Any],
        init: object,
        xs: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        noted = _reads.noted
        if noted is None:
            return original(f, init, xs, *args, **kwargs)
        f = _within(f, in_scan=True)
        leaves, tree = jax.tree.flatten(xs)
        reads = [noted.get(id(leaf)) for leaf in leaves]
        slices = [read and read[2].of_slices() for read in reads]
        if not any(slices):
            return original(f, init, xs, *args, **kwargs)
        parts = [
            read[1] if read and sliced else leaf
            for leaf, read, sliced in zip(leaves, reads, slices, strict=True)
        ]

        def step(carry: object, x: object) -> Any:
            values = [
                _gathered(part, sliced) if sliced else part
                for part, sliced in zip(jax.tree.leaves(x), slices, strict=True)
            ]
            return f(carry, tree.unflatten(values))

        # The backward pass gathers again, so that no step keeps its slice.
        # A policy would hold inside of the user's own checkpoints, too.
        policy = None if _has_checkpoint(f, init, xs) else _may_keep
        again = _checkpoint(step, policy=policy, prevent_cse=False)
        return original(again, init, tree.unflatten(parts), *args, **kwargs)

    return scan


def _table() -> Iterator[Hook]:
    yield from HOOKS.rows()
    why = "each step of a scan gathers its own slice of a variable"
    yield Hook(jax.lax, "scan", hook_scan, why)
    yield Hook(jax, "checkpoint", hook_checkpoint, why)
    yield Hook(jax, "remat", hook_checkpoint, why)


# What is replaced for strategies that shard variables.
WITH_SCANS = Hooks(_table)


def _within(fn: Callable[..., Any], **flags: bool) -> Callable[..., Any]:
    """Makes a function note where its reads are, if these are gathered."""

    @functools.wraps(fn)
    def within(*args: Any, **kwargs: Any) -> Any:
        with replaced(_reads, **flags):
            return fn(*args, **kwargs)

    return within


def _has_checkpoint(f: Callable[..., Any], init: object, xs: object) -> bool:
    """Tells whether a step computes something again in the backward pass."""
    x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs
    )
    return jaxprs.has_checkpoint(jax.make_jaxpr(f)(init, x))


def _gathered(part: object, division: Shards) -> Any:
    gathered = jax.lax.with_sharding_constraint(
        division.constrained(part), division.used
    )
    return checkpoint_name(gathered, _GATHERED)


def _may_keep(primitive: Any, *_: Any, **__: Any) -> bool:
    """Tells whether the backward pass may use what an operation gave."""
    return primitive.name not in ("name", "sharding_constraint")
