"""Compiler: what an executor gives to functions that are compiled."""

import contextlib
import threading
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from keras_dist.function import Function
    from keras_dist.strategy_base import StrategyBase


class Compiler(ABC):
    """Compiles functions for the plan of one executor."""

    @abstractmethod
    def call(
        self, function: "Function", args: Sequence[Any], kwargs: Mapping
    ) -> Any:
        """Calls a function, compiled, in the context that the caller is in.

        Args:
            function: The `Function`.
            args: Its positional arguments; per-replica values are among them
                where it is called in cross-replica context.
            kwargs: Its keyword arguments.
        """

    @abstractmethod
    def run(
        self,
        strategy: "StrategyBase",
        fn: "Function | Callable[..., Any]",
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """`strategy.run` of a compiled function, or in the midst of one.

        Args:
            strategy: The `Strategy`.
            fn: A `Function`; or any callable where `is_tracing`.
            args: Positional arguments, as `strategy.run` takes them.
            kwargs: Keyword arguments, likewise.
        """

    @property
    def is_tracing(self) -> bool:
        """Whether `run` in this thread is part of a function it traces."""
        return False


class _Current(threading.local):
    inlines = False


_current = _Current()


@contextlib.contextmanager
def inlining() -> Iterator[None]:
    """While a compiled function is traced: functions in it are part of it."""
    before, _current.inlines = _current.inlines, True
    try:
        yield
    finally:
        _current.inlines = before


def inlines() -> bool:
    """Whether this thread traces a compiled function."""
    return _current.inlines
