"""The strategies whose scopes Keras' tests run in, by name."""

PLAIN = "plain"

# TensorFlow keeps the optimizer's state whole on each replica, by design, and
# PyTorch on each process.
STRATEGIES = {
    "jax": ("mirrored", "central", "sharded"),
    "tensorflow": ("mirrored", "central"),
    "torch": ("mirrored", "central"),
}


def make_strategy(name):
    """A strategy with two replicas.

    Args:
        name: String, one of `STRATEGIES`' values, or `PLAIN`.

    Returns:
        A `Strategy`, or `None` for plain Keras, which does not import
        keras_dist at all.
    """
    if name == PLAIN:
        return None
    import keras_dist

    devices = ["cpu:0", "cpu:1"]
    if name == "central":
        return keras_dist.CentralStorageStrategy(devices)
    return keras_dist.MirroredStrategy(
        devices,
        optimizer_state="sharded" if name == "sharded" else "mirrored",
    )
