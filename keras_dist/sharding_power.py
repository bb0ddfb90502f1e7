"""ShardsOptimizerState: what a backend has that can split it over replicas."""

import keras

from keras_dist.backend import get_backend


class ShardsOptimizerState:
    """A `Backend` whose executors carry out plans that shard it.

    An executor then keeps a part of each variable of an optimizer on each
    replica, as long as `Plan.shards_optimizer` says so.
    """


def check_optimizer_state(optimizer_state: str) -> bool:
    """Whether a user asks for a sharded optimizer state.

    Args:
        optimizer_state: String, `"mirrored"` or `"sharded"`.

    Raises:
        ValueError: If it is something else, or if the backend can't do it.
    """
    if optimizer_state not in ("mirrored", "sharded"):
        raise ValueError(
            "`optimizer_state` says where an optimizer's variables are. "
            f"Received: {optimizer_state!r}. Expected: 'mirrored' or "
            "'sharded'."
        )
    shards = optimizer_state == "sharded"
    if shards and not isinstance(get_backend(), ShardsOptimizerState):
        raise ValueError(
            f"The backend '{keras.backend.backend()}' keeps a copy of the "
            "optimizer's variables on each replica. Received: "
            "optimizer_state='sharded'. Expected: 'mirrored', or another "
            "backend, chosen with KERAS_BACKEND: 'jax' and 'torch' have it."
        )
    return shards
