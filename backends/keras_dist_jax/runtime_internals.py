"""The one door to the private names of JAX's distributed runtime.

| name | why |
|---|---|
| `jaxlib._jax.get_distributed_runtime_service` | a coordinator outside of |
| | the workers, which lives on when one of them dies |
| `jaxlib._jax.get_distributed_runtime_client` | `jax.distributed.initialize`|
| | starts a service too, and can't leave faults to the watch |
| `jaxlib._jax.make_gloo_tcp_collectives` | to listen on the worker's own |
| | address instead of the one that its host's name stands for |
| `jax._src.distributed.global_state` | where JAX looks for the client |
| `jax._src.xla_bridge.backends_are_initialized` | whether it is too late |
| `jax._src.xla_bridge.make_cpu_client` | takes these collectives |
| `jax._src.xla_bridge.register_backend_factory` | makes JAX call it |
| `jax._src.api.clean_up`, `jax._src.dispatch.wait_for_tokens` | would wait |
| | at exit for workers that were lost |
| `client.key_value_set`, `key_value_dir_get` | how workers tell each other |
| | that they live |

Imported late: the coordinator needs the first one only, and has no Keras. The
backend calls `check` when it is loaded.
"""

import atexit
from typing import Any

# Seconds. JAX aborts processes after its own timeouts, so these are long: the
# watch reports lost workers better.
_NEVER = 7 * 24 * 3600
_PRIVATE = (
    "jax._src.api.clean_up",
    "jax._src.dispatch.wait_for_tokens",
    "jax._src.distributed.global_state",
    "jax._src.xla_bridge.backends_are_initialized",
    "jax._src.xla_bridge.make_cpu_client",
    "jax._src.xla_bridge.register_backend_factory",
    "jaxlib._jax.DistributedRuntimeClient.key_value_dir_get",
    "jaxlib._jax.DistributedRuntimeClient.key_value_set",
    "jaxlib._jax.get_distributed_runtime_client",
    "jaxlib._jax.get_distributed_runtime_service",
    "jaxlib._jax.make_gloo_tcp_collectives",
)
# Clients, kept as long as the process lives: their end waits for others.
_KEPT: list[Any] = []


def check() -> None:
    """Raises an error with the name if JAX lacks one of the private names."""
    from keras_dist.plugins import private

    for name in _PRIVATE:
        private(name)


def new_service(address: str, num_workers: int) -> Any:
    """Starts JAX's service, which listens on the address `"host:port"`."""
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address,
        num_workers,
        heartbeat_timeout=_NEVER,
        cluster_register_timeout=_NEVER,
        shutdown_timeout=5,
        recoverable=True,
    )


def new_client(address: str, index: int, timeout: float) -> Any:
    """Makes a client of the service at an address, not yet connected."""
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(
        address,
        index,
        rpc_timeout=max(int(timeout), 1),
        init_timeout=_NEVER,
        shutdown_timeout=5,
        heartbeat_timeout=_NEVER,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    _KEPT.append(client)
    return client


def use_client(client: object, address: str, index: int, count: int) -> None:
    """Makes JAX use a connected client, of worker `index` of `count`."""
    from jax._src import distributed

    state = distributed.global_state
    state.client, state.coordinator_address = client, address
    state.process_id, state.num_processes = index, count


def use_gloo(client: object, host: str) -> None:
    """Makes the CPU's devices connect by sockets on one of its addresses."""
    from jax._src import xla_bridge
    from jaxlib import _jax

    def make_cpu_client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=client, hostname=host
        )
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory(
        "cpu", make_cpu_client, priority=0, fail_quietly=False
    )


def has_started() -> bool:
    """Tells whether JAX has started, after which it can't join a cluster."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def num_connected() -> int:
    """Returns the number of processes that JAX connects; 0 if it does not."""
    from jax._src import distributed

    state = distributed.global_state
    return 0 if state.client is None else int(state.num_processes)


def drop_clean_up() -> None:
    """Makes JAX end with the process, without waiting for anything."""
    from jax._src import api
    from jax._src import dispatch
    from jax._src import distributed

    atexit.unregister(api.clean_up)
    atexit.unregister(dispatch.wait_for_tokens)
    distributed.global_state.client = None
