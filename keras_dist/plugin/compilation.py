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

from keras_dist.core.regroup import regroup
from keras_dist.errors import TraceError
from keras_dist.plugin.steps_in_one import snapshot
from keras_dist.plugin.steps_in_one import stack_steps

if TYPE_CHECKING:
    from keras_dist.replica.call import ReplicaCall
    from keras_dist.replica.function import Function
    from keras_dist.strategies.replica_methods import ReplicaMethods


class Compiler(ABC):
    """Compiles functions for the plan of one executor."""

    @abstractmethod
    def call(
        self,
        function: "Function",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
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
        strategy: "ReplicaMethods",
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

    def call_in_replica(
        self,
        function: "Function",
        call: "ReplicaCall",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function in a replica function that is not compiled.

        By default replicas meet, and it runs once compiled, for all of them.

        Args:
            function: The `Function`.
            call: The `ReplicaCall` of this thread.
            args: This replica's positional arguments.
            kwargs: This replica's keyword arguments.
        """
        strategy: Any = call.strategy

        def run_together(everyone: list[Any]) -> Any:
            args, kwargs = regroup(everyone, strategy.executor.per_replica)
            return self.run(strategy, function, args, kwargs)

        what = f"the compiled function '{function.name}'"
        result = call.together(what, run_together, (args, kwargs))
        return call.replica.own(result)

    def scan(
        self,
        strategy: "ReplicaMethods",
        function: "Function",
        batches: Sequence[tuple[Any, ...]],
    ) -> Any:
        """Runs a function for one batch after another.

        Args:
            strategy: The `Strategy`.
            function: The `Function`.
            batches: Sequence of the arguments of each step: per-replica
                values, with one replica tensors, of equal shapes.

        Returns:
            The nest that it returned, each leaf (of each replica) with the
            steps stacked along a new first axis.
        """
        results = [
            snapshot(self.run(strategy, function, each, None))
            for each in batches
        ]
        return stack_steps(strategy, results)

    @property
    def is_tracing(self) -> bool:
        """Whether `run` in this thread is part of a function it traces."""
        return False


class _Current(threading.local):
    inlines = False
    # The compiled function that is not to make variables any more.
    has_made_all: str | None = None


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


@contextlib.contextmanager
def refusing_variables(name: str | None) -> Iterator[None]:
    """While a function runs or is traced again: it made all in its first call.

    Args:
        name: String, the function's name, for the error; `None` to allow
            variables for a while.
    """
    before, _current.has_made_all = _current.has_made_all, name
    try:
        yield
    finally:
        _current.has_made_all = before


def check_creation() -> None:
    """Refuses a variable that a compiled function makes too late.

    Raises:
        TraceError: Under `refusing_variables`.
    """
    if _current.has_made_all is not None:
        raise creation_error(_current.has_made_all)


def creation_error(name: str) -> TraceError:
    """The error of a function that makes variables in a later trace."""
    return TraceError(
        f"The compiled function '{name}' made a `keras.Variable` in a later "
        "call than its first, or each time it is traced. Expected: variables, "
        "layers, metrics and optimizers made outside, once, or kept from the "
        "first call on. Build what is built lazily before it is needed: "
        "`model.build(shape)`, `optimizer.build(model.trainable_variables)`."
    )


def thread_state() -> tuple[bool, str | None]:
    """What a thread that works for this one has to `inherit`."""
    return _current.inlines, _current.has_made_all


def inherit(state: tuple[bool, str | None]) -> None:
    """Gives this thread the `thread_state` of the one it works for."""
    _current.inlines, _current.has_made_all = state
