"""Random draws of `keras.random` in `fit`: rows of those of one device."""

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_dist.errors import see_section
from keras_dist.internals import keras_internals
from keras_dist.internals.hooks import as_hook
from keras_dist.plugin.draws import Draw
from keras_dist.plugin.draws import drawer
from keras_dist.plugin.draws import has_common_seeds
from keras_dist.plugin.draws import with_common_seeds
from keras_dist.replica import state

# By layer: those that were warned of.
_warned: "weakref.WeakSet[keras.Layer]" = weakref.WeakSet()

# The functions of Keras' that draw.
NAMES = (
    "beta",
    "binomial",
    "categorical",
    "dropout",
    "gamma",
    "normal",
    "randint",
    "shuffle",
    "truncated_normal",
    "uniform",
)


def hook_drawing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that draws, so that replicas draw rows."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        step = state.of_thread.step
        if step is not None and step.is_compiled:
            return step.replica.draw_traced(original, *args, **kwargs)
        by = drawer() if step is None else step.replica.draw
        # Keras' functions call each other.
        if by is None or has_common_seeds():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        where = keras_internals.place_in_call()
        made = Draw(name, original, bound.arguments, where, _warn_of_shuffle)
        if not made.is_made:
            return original(*args, **kwargs)
        with with_common_seeds():
            return by(made)

    return draw


@as_hook
def hook_seed(
    original: Callable[..., Any], self: Any, ordered: bool = True
) -> Any:
    seed = original(self, ordered)
    step = None if has_common_seeds() else state.current_replica()
    offset = 0 if step is None else step.replica.seed_offset
    if isinstance(offset, int) and not offset:
        return seed
    # Added to the drawn seed and not to the stored state, which stays the same
    # on each replica and equals that of one device.
    return seed + ops.convert_to_tensor([offset, 0], dtype=seed.dtype)


def _warn_of_shuffle() -> None:
    layer = keras_internals.innermost_layer()
    if layer is not None:
        if layer in _warned:
            return
        _warned.add(layer)
    name = "A step" if layer is None else f"Layer '{layer.name}'"
    warnings.warn(
        f"{name} shuffles the rows of a batch (`keras.random.shuffle`), and "
        "combines different rows. Each replica has only its own rows, and "
        "shuffles those. Expected: draws for each row, or one device. "
        f"{see_section('The numbers differ')}",
        stacklevel=2,
    )
