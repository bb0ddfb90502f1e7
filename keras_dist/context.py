"""Which strategy and which replica this thread is in."""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keras_dist.errors import StrategyMismatchError

if TYPE_CHECKING:
    from keras_dist.strategy import Strategy


class _Stack(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Strategy] = []
        self.in_replica = False


_stack = _Stack()


def current_strategy() -> "Strategy | None":
    """The strategy whose scope this thread is in, or `None`."""
    return _stack.scopes[-1] if _stack.scopes else None


def has_strategy() -> bool:
    """Whether this thread is inside of a `strategy.scope()`.

    Example:

    >>> keras_dist.has_strategy()
    False
    """
    return bool(_stack.scopes)


def in_cross_replica_context() -> bool:
    """Whether this thread is under `strategy.scope()` and in no replica.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0"])
    >>> with strategy.scope():
    ...     keras_dist.in_cross_replica_context()
    True
    """
    return has_strategy() and not _stack.in_replica


@contextlib.contextmanager
def entered(strategy: "Strategy") -> Iterator[None]:
    """Makes `strategy` current for this thread.

    Raises:
        StrategyMismatchError: If another strategy's scope is open.
    """
    outer = current_strategy()
    if outer is not None and outer is not strategy:
        raise StrategyMismatchError(
            "Mixing different tf.distribute-style Strategy objects: the scope "
            f"of {strategy!r} was entered inside of the scope of {outer!r}. "
            "Expected: one strategy at a time. Leave the outer scope first."
        )
    _stack.scopes.append(strategy)
    try:
        yield
    finally:
        _stack.scopes.pop()


@contextlib.contextmanager
def in_replica(strategy: "Strategy | None") -> Iterator[None]:
    """Marks this thread as running one replica of `strategy`."""
    scopes, outer = _stack.scopes, _stack.in_replica
    _stack.scopes = [] if strategy is None else [strategy]
    _stack.in_replica = strategy is not None
    try:
        yield
    finally:
        _stack.scopes, _stack.in_replica = scopes, outer
