"""Checks that an optimizer can update each part of a variable on its own."""

from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.internals.keras_internals import is_of_keras
from keras_dist.internals.overrides import overrides

# The class attribute by which a user's optimizer declares that its update is
# elementwise.
DECLARATION = "is_elementwise"
_ELEMENTWISE = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",
)
_REASONS = {
    "Lamb": "it scales updates by norms of each whole variable",
    "Adafactor": "it keeps sums over rows and columns of each variable",
    "Muon": "it makes matrices orthogonal, which takes all of their elements",
    "MultiOptimizer": "it is several optimizers",
}


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that needs whole variables.

    A user's optimizer is accepted if `is_elementwise` of its class is `True`:
    the new value of an element then depends on that element of the gradient,
    the variable and the slots alone. It must have a `get_config`, leave `apply`
    as it is, and make slots with `add_variable_from_reference` or
    `add_optimizer_variables`.

    Raises:
        UnsupportedModelError: If its update is not elementwise, or not known to
            be.

    Example:

    >>> from keras_dist.sharding.elementwise import check_optimizer
    >>> check_optimizer(keras.optimizers.Adam())
    """
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        optimizer = optimizer.inner_optimizer
    cls = type(optimizer)
    has_own_apply = overrides(cls, "apply")
    if getattr(cls, DECLARATION, False) is True and not has_own_apply:
        return
    own = is_of_keras(cls)
    if own and cls.__name__ in _ELEMENTWISE:
        return
    reason = "nothing says that its update is elementwise"
    if has_own_apply:
        reason = "its `apply` is its own, and may need whole gradients"
    if own:
        reason = _REASONS.get(cls.__name__, reason)
    raise UnsupportedModelError(
        "With optimizer_state='sharded', each replica updates its part of "
        "each variable, so an optimizer has to work on each element alone. "
        f"Received: '{optimizer.name}' of class {cls.__name__}: {reason}. "
        f"Expected: one of Keras' {', '.join(_ELEMENTWISE)}, or a class of "
        f"your own that declares `{DECLARATION} = True`. Use one of these, or "
        "optimizer_state='mirrored'."
    )
