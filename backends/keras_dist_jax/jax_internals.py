"""The one door to JAX's private names, except its distributed runtime's.

Those are in `runtime_internals`, which the coordinator needs without JAX.

| name | why |
|---|---|
| `jax._src.interpreters.pxla.batched_device_put` | one call for all shards of |
| | an array; public ways cost Python calls for each device |
| `jax._src.array.ArrayImpl` | an array that JAX may move; public ways copy |
| `jax.interpreters.partial_eval.dce_jaxpr` | the part of a program that some |
| | of its results need |
| `jax._src.dispatch.runtime_tokens` | the error of a callback, which JAX |
| | raises again at each `jax.effects_barrier` |

Without the first, batches are passed on in host memory, which is right but
slower.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from keras_dist_jax.targets import described
from keras_dist_jax.targets import is_described

try:
    from jax._src.interpreters import pxla
except ImportError:
    pxla = None

put_shards: Callable[..., Any] | None = getattr(
    pxla, "batched_device_put", None
)


def from_shards(
    aval: Any, sharding: Any, shards: Sequence[Any], devices: Sequence[Any]
) -> Any:
    """Makes an array of the shards of this worker's devices, copied there."""
    if put_shards is not None and not any(map(_is_spread, shards)):
        return put_shards(aval, sharding, shards, devices)
    placed = [
        jax.device_put(shard, device)
        for shard, device in zip(shards, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(
        aval.shape, sharding, placed
    )


def _is_spread(shard: Any) -> bool:
    """Returns true for an array on several devices, which has no one buffer."""
    return isinstance(shard, jax.Array) and len(shard.devices()) > 1


def put_on(arrays: Sequence[Any], sharding: Any, devices: Any) -> list[Any]:
    """Copies arrays of one device each to a replicated sharding, at once."""
    count = len(devices)
    return [
        described(a, sharding)
        if is_described(a)
        else from_shards(a.aval, sharding, [a] * count, devices)
        for a in arrays
    ]


def forget_effects() -> None:
    """Forgets the effects that JAX waits for, after one raised an error."""
    from jax._src import dispatch

    dispatch.runtime_tokens.clear()


def uncommitted(array: Any) -> Any:
    """Returns an array of one device, in the same memory, that JAX may move."""
    from jax._src.array import ArrayImpl

    if is_described(array) or not array.committed:
        return array
    return ArrayImpl(array.aval, array.sharding, [array], committed=False)


def needed_for(jaxpr: Any, outputs: list[bool]) -> tuple[Any, list[bool]]:
    """Extracts a program's part for some results; tells what it takes."""
    part, inputs = partial_eval.dce_jaxpr(jaxpr, outputs)
    return part, list(inputs)
