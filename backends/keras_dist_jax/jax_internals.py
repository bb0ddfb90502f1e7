"""The one door to JAX's private names, but for its distributed runtime's.

Those are in `runtime_internals`, which the coordinator needs without JAX.

| name | why |
|---|---|
| `jax._src.interpreters.pxla.batched_device_put` | one call for all shards of |
| | an array; public ways cost Python calls for each device |

Without it batches are passed on in host memory, which is right but slower.
"""

from collections.abc import Callable
from typing import Any

try:
    from jax._src.interpreters import pxla
except ImportError:
    pxla = None

put_shards: Callable[..., Any] | None = getattr(
    pxla, "batched_device_put", None
)
