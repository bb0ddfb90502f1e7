"""The JAX backend of keras_dist."""

from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from keras_dist_jax.backend import JaxBackend

__all__ = ["JaxBackend"]


def __getattr__(name: str) -> Any:
    # Lazy, because the coordinator's process imports this package without
    # Keras.
    if name != "JaxBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keras_dist_jax.backend import JaxBackend

    return JaxBackend
