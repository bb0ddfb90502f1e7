"""Random draws that are equal for each row, so for each replica.

While two runs of a model are compared, a draw has one number for each position
on the last axis, repeated along all others: so rows don't matter.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_dist.internals import keras_random

_OF_SHAPE = (
    "normal",
    "uniform",
    "randint",
    "truncated_normal",
    "gamma",
    "binomial",
    "beta",
)


@contextlib.contextmanager
def equal_draws() -> Iterator[set[str]]:
    """Makes Keras draw the same for each row; yields what has drawn."""
    drawn: set[str] = set()
    module = keras_random.random_backend
    # By name, the stand-in, and the function of Keras that draws for it.
    given: dict[str, tuple[Callable[..., Any], str]] = {
        "dropout": (_dropout, "dropout"),
        "categorical": (_categorical, "uniform"),
        "shuffle": (_shuffle, "shuffle"),
        **{name: (_of_shape, name) for name in _OF_SHAPE},
    }
    originals = {name: getattr(module, name) for name in given}
    seeds = keras.random.SeedGenerator
    next_seed = seeds.next
    for name, (draw, source) in given.items():
        own = functools.partial(draw, originals[source])
        hook = functools.partial(_noted, drawn, name, own)
        setattr(module, name, hook)
    # Without the offset that keras_dist adds on each replica.
    seeds.next = getattr(next_seed, "__wrapped__", next_seed)
    try:
        yield drawn
    finally:
        seeds.next = next_seed
        for name, original in originals.items():
            setattr(module, name, original)


def _noted(
    drawn: set[str],
    name: str,
    draw: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    drawn.add(name)
    return draw(*args, **kwargs)


def _of_shape(
    original: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any
) -> Any:
    whole = _sizes(shape)
    if not whole:
        return original(shape, *args, **kwargs)
    one_row = (*[1] * (len(whole) - 1), whole[-1] if whole[1:] else 1)
    value = original(one_row, *args, **kwargs)
    return ops.broadcast_to(value, tuple(whole))


def _dropout(
    original: Callable[..., Any],
    inputs: Any,
    rate: float,
    noise_shape: Any = None,
    seed: Any = None,
) -> Any:
    sizes = len(inputs.shape)
    last = inputs.shape[-1] if sizes > 1 else 1
    if noise_shape is not None and noise_shape[-1] is not None:
        last = noise_shape[-1]
    one_row = (*[1] * (sizes - 1), last)
    return original(inputs, rate, noise_shape=one_row, seed=seed)


def _categorical(
    original: Callable[..., Any],
    logits: Any,
    num_samples: int,
    dtype: str = "int32",
    seed: Any = None,
) -> Any:
    """Takes the largest of logits with Gumbel noise added (Gumbel, 1954)."""
    shape = (1, num_samples, logits.shape[-1])
    uniform = original(shape, 1e-6, 1.0 - 1e-6, seed=seed)
    noise = ops.cast(-ops.log(-ops.log(uniform)), logits.dtype)
    scores = ops.expand_dims(logits, 1) + noise
    return ops.cast(ops.argmax(scores, axis=-1), dtype)


def _shuffle(
    original: Callable[..., Any], x: Any, axis: int = 0, seed: Any = None
) -> Any:
    """Returns `x` as it is: an order of rows depends on all of them."""
    return x


def _sizes(shape: Any) -> list[Any]:
    if isinstance(shape, (list, tuple)):
        return list(shape)
    return [shape[i] for i in range(shape.shape[0])]
