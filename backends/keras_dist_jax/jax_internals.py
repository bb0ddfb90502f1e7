"""The one door to JAX's private names, except its distributed runtime's.

Those are in `runtime_internals`, which the coordinator needs without JAX.

| name | why |
|---|---|
| `jax._src.interpreters.pxla.batched_device_put` | one call for all shards of |
| | an array; public ways cost Python calls for each device |
| `jax._src.array.ArrayImpl` | an array that JAX may move; public ways copy |
| `jax.extend.core.ClosedJaxpr` | a program with the values of its constants, |
| | in JAX 0.10; later, each `Jaxpr` has them |
| the parameters of a `scan`'s equation | what stays, is carried, or is cut |
| those of a `shard_map`'s equation | the axes that its program is for one of |
| `jax._src.core.set_current_trace`, | computes where a value is from, |
| `jax.core.Tracer._trace` | while a loop is traced |
| `jax._src.core.trace_ctx.trace`, `parent_trace` of a trace, | the loops and |
| `BatchTrace`, `DynamicJaxprTrace` | `jax.vmap`s that are traced |
| `jax._src.core.extend_axis_env_nd` | an axis of no size, by which JAX traces |
| | functions anew |
| `jax._src.dispatch.runtime_tokens` | the error of a callback, which JAX |
| | raises again at each `jax.effects_barrier` |

If one of them moves, `private` raises an error with its name.
"""

import contextlib
import itertools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from keras_dist.plugins import private
from keras_dist_jax.machine import described
from keras_dist_jax.machine import is_described

_dispatch = private("jax._src.dispatch")
_ArrayImpl = private("jax._src.array.ArrayImpl")

private("jax._src.dispatch.runtime_tokens.clear")
private("jax.core.eval_jaxpr")
_set_current_trace = private("jax._src.core.set_current_trace")
_extend_axis_env = private("jax._src.core.extend_axis_env_nd")
_traces = private("jax._src.core.trace_ctx")
_BatchTrace = private("jax._src.interpreters.batching.BatchTrace")
_ProgramTrace = private("jax._src.interpreters.partial_eval.DynamicJaxprTrace")

_put_shards = private("jax._src.interpreters.pxla.batched_device_put")


def from_shards(
    aval: Any, sharding: Any, shards: Sequence[Any], devices: Sequence[Any]
) -> Any:
    """Makes an array of the shards of this worker's devices, copied there."""
    if not any(map(_is_spread, shards)):
        return _put_shards(aval, sharding, shards, devices)
    placed = [
        jax.device_put(shard, device)
        for shard, device in zip(shards, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(
        aval.shape, sharding, placed
    )


def _is_spread(shard: object) -> bool:
    """Returns true for an array on several devices, which has no one buffer."""
    return isinstance(shard, jax.Array) and len(shard.devices()) > 1


def put_on(arrays: Sequence[Any], sharding: Any, devices: Any) -> list[Any]:
    """Copies arrays of one device each to a replicated sharding, at once."""
    count = len(devices)
    return [
        described(a, sharding)
        if is_described(a)
        else from_shards(_aval_of(a), sharding, [a] * count, devices)
        for a in arrays
    ]


def _aval_of(array: jax.Array) -> Any:
    """Describes an array without the memory that it lies in."""
    return jax.core.ShapedArray(array.shape, array.dtype, array.weak_type)


def forget_effects() -> None:
    """Forgets the effects that JAX waits for, after one raised an error."""
    _dispatch.runtime_tokens.clear()


def uncommitted(array: jax.Array) -> Any:
    """Returns an array of one device, in the same memory, that JAX may move."""
    if is_described(array) or not array.committed:
        return array
    return _ArrayImpl(array.aval, array.sharding, [array], committed=False)


def tracing_with(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operations are traced around a loop: by the
    trace that made a value, which may be of a function that holds the loop."""
    return _as_context(_set_current_trace(value._trace))


def is_traced_by(value: Any) -> bool:
    """Tells whether operations are traced by the trace that made a value, and
    not by one of a branch, a loop or a transformation inside of it."""
    return _traces.trace is value._trace


def around_maps(value: object = None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operations are traced around `jax.vmap`.

    With a value, only if it is the same for all rows, and no branch or loop is
    in between.
    """
    inside, parent, trace = [], None, _traces.trace
    while trace is not None:
        inside.append(trace)
        if isinstance(trace, _BatchTrace):
            parent = trace.parent_trace
            passed = list(inside)
        trace = getattr(trace, "parent_trace", None)
    if parent is None:
        return contextlib.nullcontext()
    if value is not None and (
        any(isinstance(passed_trace, _ProgramTrace) for passed_trace in passed)
        or any(
            getattr(value, "_trace", None) is passed_trace
            for passed_trace in passed
        )
    ):
        return contextlib.nullcontext()
    return _as_context(_set_current_trace(parent))


_numbers = itertools.count()


def tracing_anew() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX takes nothing from traces outside of it.

    It keeps the programs of functions that it has traced, by the axes that are
    there: what such a program uses of its surroundings would be of before.
    """
    return _as_context(_extend_axis_env([(f"keras_dist {next(_numbers)}", 1)]))


def _as_context(value: Any) -> contextlib.AbstractContextManager[Any]:
    context: contextlib.AbstractContextManager[Any] = value
    return context


_Closed: type[Any] = getattr(core, "ClosedJaxpr", core.Jaxpr)


def is_program(value: object) -> bool:
    """Tells whether a value is a program, with its constants or without."""
    return isinstance(value, (_Closed, core.Jaxpr))


def _is_pair(program: object) -> bool:
    """Tells whether a program keeps its constants beside its equations."""
    return isinstance(program, _Closed) and not isinstance(program, core.Jaxpr)


def opened(program: Any) -> Any:
    """Returns the object that has a program's equations and variables."""
    return program.jaxpr if _is_pair(program) else program


def with_parts(program: Any, **parts: Any) -> Any:
    """Returns a program with other equations, inputs or results.

    Its constants stay.
    """
    if _is_pair(program):
        return core.ClosedJaxpr(program.jaxpr.replace(**parts), program.consts)
    return program.replace(**parts)


def is_mutable(atom: Any) -> bool:
    """Tells whether a variable of a program is a mutable array."""
    return isinstance(atom.aval, jax.ref.AbstractRef)


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many arguments of a `scan` stay, and how many it carries."""
    if "ft_in" in params:
        stay, carried, _ = params["ft_in"].unpack()
        return len(stay), len(carried)
    return params["num_consts"], params["num_carry"]


def manual_axes(params: Mapping[str, Any]) -> frozenset[str]:
    """Returns the mesh's axes along which a `shard_map` is one device's."""
    for name in ("newly_manual_axes", "manual_axes"):
        if name in params:
            return frozenset(params[name])
    return frozenset(params["mesh"].axis_names)
