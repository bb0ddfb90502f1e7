"""Settings of an optimizer that users may change after it was built."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.internals import keras_internals

# Attributes that look like settings and are none.
_NO_SETTINGS = ("name", "built", "_lock")


def inner_of(optimizer: Any) -> Any:
    """Returns the optimizer in a `LossScaleOptimizer`, or any other itself."""
    return vars(optimizer).get("inner_optimizer", optimizer)


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Returns the settings that users may assign, without the learning rate."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NO_SETTINGS
        and _is_setting(value, is_public=not name.startswith("_"))
    }


def _is_setting(value: Any, is_public: bool) -> bool:
    """Returns whether an attribute's value is plain data that users may assign.

    Variables are not, nor are lists and dicts that Keras keeps in private
    names.
    """
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        if not (is_public or isinstance(value, tuple)):
            return False
        parts = value.values() if isinstance(value, dict) else value
        return all(_is_setting(part, is_public) for part in parts)
    plain = (bool, int, float, str, type(None), np.generic)
    return isinstance(value, plain)


def settings_text(optimizer: Any, variables: Sequence[keras.Variable]) -> str:
    """Returns a text that changes whenever a compiled update is out of date."""
    inner = inner_of(optimizer)
    own = [sorted(settings_of(each).items()) for each in (optimizer, inner)]
    decays = [keras_internals.uses_weight_decay(inner, v) for v in variables]
    return repr((own, decays))


def rate_now(optimizer: Any) -> Any:
    """Returns the current learning rate of a schedule or another function.

    Returns:
        Number or scalar tensor; `None` if the learning rate is a variable.
    """
    inner = inner_of(optimizer)
    rate = keras_internals.learning_rate_of(inner)
    return None if isinstance(rate, keras.Variable) else inner.learning_rate
