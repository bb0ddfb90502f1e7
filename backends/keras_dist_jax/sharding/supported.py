"""The optimizers whose state can be in parts."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import inner_of
from keras_dist.plugins import is_of_keras
from keras_dist.plugins import learning_rate_of
from keras_dist.plugins import overrides
from keras_dist.plugins import uses_weight_decay

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


def check_optimizer(optimizer: keras.Optimizer) -> None:
    """Refuses an optimizer whose update is not elementwise, by its class or by
    the declaration `is_elementwise` of a user's own."""
    optimizer = _unscaled(optimizer)
    reason, cls = _reason_against(optimizer), type(optimizer)
    if reason is None:
        return
    raise UnsupportedModelError(
        "With optimizer_state='sharded', each replica updates its part of "
        "each variable, so an optimizer has to work on each element alone.\n"
        f"Received: '{optimizer.name}' of class {cls.__name__}: {reason}. "
        f"Expected: one of Keras' {', '.join(_ELEMENTWISE)}, or a class of "
        f"your own that declares `{DECLARATION} = True`. Use one of these, or "
        "optimizer_state='mirrored'."
    )


def is_elementwise(optimizer: keras.Optimizer) -> bool:
    """Tells whether an optimizer can update a part of a variable alone."""
    return _reason_against(_unscaled(optimizer)) is None


def _unscaled(optimizer: keras.Optimizer) -> Any:
    """Returns the optimizer in Keras' own `LossScaleOptimizer`, or itself."""
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        return optimizer.inner_optimizer
    return optimizer


def _reason_against(optimizer: keras.Optimizer) -> str | None:
    cls = type(optimizer)
    has_own_apply = overrides(cls, "apply")
    if getattr(cls, DECLARATION, False) is True and not has_own_apply:
        return None
    is_built_in = is_of_keras(cls)
    if is_built_in and cls.__name__ in _ELEMENTWISE:
        return None
    reason = "it does not declare that its update is elementwise"
    if has_own_apply:
        reason = "it overrides `apply`, which may need whole gradients"
    return _REASONS.get(cls.__name__, reason) if is_built_in else reason


# Attributes that look like settings and are none.
_NO_SETTINGS = ("name", "built", "_lock")


def settings_of(optimizer: keras.Optimizer) -> dict[str, Any]:
    """Returns the settings that users may assign, without the learning rate."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NO_SETTINGS
        and _is_setting(value, is_public=not name.startswith("_"))
    }


def _is_setting(value: object, is_public: bool) -> bool:
    """Returns whether an attribute is plain data that users may assign."""
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        if not (is_public or isinstance(value, tuple)):
            return False
        parts = value.values() if isinstance(value, dict) else value
        return all(_is_setting(part, is_public) for part in parts)
    plain = (bool, int, float, str, type(None), np.generic)
    return isinstance(value, plain)


def settings_text(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable]
) -> str:
    """Returns a text that changes whenever a compiled update is out of date."""
    inner = inner_of(optimizer)
    settings = [
        sorted(settings_of(owner).items()) for owner in (optimizer, inner)
    ]
    decays = [uses_weight_decay(inner, v) for v in variables]
    return repr((settings, decays))


def rate_now(optimizer: keras.Optimizer) -> Any:
    """Returns the value of a learning rate that is no variable, else `None`."""
    inner = inner_of(optimizer)
    rate = learning_rate_of(inner)
    return None if isinstance(rate, keras.Variable) else inner.learning_rate
