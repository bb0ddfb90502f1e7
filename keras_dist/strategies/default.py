"""The strategy that is current when no other is."""

import contextlib
import functools
from collections.abc import Iterator
from typing import final

import keras

from keras_dist import context
from keras_dist.device import Device
from keras_dist.plan import Plan
from keras_dist.strategy import Strategy


@final
class DefaultStrategy(Strategy):
    """Plain Keras: its scope changes nothing.

    It asks the backend for nothing, so looking at it starts no device.
    """

    def __init__(self) -> None:
        device = Device("cpu", 0)
        self._plan = Plan(((device,),), (device,))

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Does nothing."""
        yield self

    def distribute(self, model: keras.Model) -> keras.Model:
        """Returns the model as it is."""
        return model

    def devices_of(self, variable: keras.Variable) -> tuple[str, ...]:
        """Unknown to plain Keras: an empty tuple."""
        return ()

    def __repr__(self) -> str:
        return "<DefaultStrategy>"


@functools.cache
def default_strategy() -> DefaultStrategy:
    """The one `DefaultStrategy`."""
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """The strategy whose scope this thread is in, or the default one.

    Example:

    >>> keras_dist.get_strategy()
    <DefaultStrategy>
    """
    return context.current_strategy() or default_strategy()
