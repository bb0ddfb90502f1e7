"""Compiler: compiles functions for the plan of one executor."""

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

from keras_dist.errors import TraceError
from keras_dist.regroup import regroup
from keras_dist.steps_in_one import snapshot
from keras_dist.steps_in_one import stack_steps

if TYPE_CHECKING:
    from keras_dist.function import Function
    from keras_dist.replica_methods import ReplicaMethods
    from keras_dist.training.call import ReplicaCall


class Compiler(ABC):
    """A compiler of functions for the plan of one executor."""

    @abstractmethod
    def call(
        self,
        function: "Function",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function, compiled, in the context that the caller is in.

        In cross-replica context, arguments may be per-replica values.
        """

    @abstractmethod
    def run(
        self,
        strategy: "ReplicaMethods",
        fn: "Function | Callable[..., Any]",
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Implements `strategy.run` of, or inside, a compiled function.

        `fn` is a `Function`, or, where `is_tracing`, any callable.
        """

    def call_in_replica(
        self,
        function: "Function",
        call: "ReplicaCall",
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a compiled function from a replica function that is not.

        By default replicas wait for each other, and one compiled call runs
        the function for all of them.
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
            strategy: The `Strategy` that runs the function.
            function: The `Function` of one step.
            batches: Sequence with the arguments of each step: per-replica
                values, or tensors with one replica, of equal shapes.

        Returns:
            Nest like the function's result. Each leaf, on each replica, has
            the steps stacked along a new first axis.
        """
        results = [
            snapshot(self.run(strategy, function, each, None))
            for each in batches
        ]
        return stack_steps(strategy, results)

    @property
    def is_tracing(self) -> bool:
        """True while this compiler traces a function in this thread."""
        return False


class _Current(threading.local):
    inlines = False
    # Name of the compiled function that may not create variables any more.
    has_made_all: str | None = None


_current = _Current()


@contextlib.contextmanager
def inlining() -> Iterator[None]:
    """Makes inner compiled functions part of the one that is being traced."""
    before, _current.inlines = _current.inlines, True
    try:
        yield
    finally:
        _current.inlines = before


def inlines() -> bool:
    """Returns true while this thread traces a compiled function."""
    return _current.inlines


@contextlib.contextmanager
def refusing_variables(name: str | None) -> Iterator[None]:
    """Makes `check_creation` raise, for a function after its first call.

    `name` is the function's name, for the error; `None` allows variables
    meanwhile.
    """
    before, _current.has_made_all = _current.has_made_all, name
    try:
        yield
    finally:
        _current.has_made_all = before


def check_creation() -> None:
    """Raises `TraceError` under `refusing_variables`."""
    if _current.has_made_all is not None:
        raise creation_error(_current.has_made_all)


def creation_error(name: str) -> TraceError:
    """Returns the error for a function that creates variables too late."""
    return TraceError(
        f"The compiled function '{name}' made a `keras.Variable` in a later "
        "call than its first, or each time it is traced. Expected: variables, "
        "layers, metrics and optimizers made outside, once, or kept from the "
        "first call on. Build what is built lazily before it is needed: "
        "`model.build(shape)`, `optimizer.build(model.trainable_variables)`."
    )


def thread_state() -> tuple[bool, str | None]:
    """Returns this thread's state for a helper thread to `inherit`."""
    return _current.inlines, _current.has_made_all


def inherit(state: tuple[bool, str | None]) -> None:
    """Sets this thread's state to the `thread_state` of another thread."""
    _current.inlines, _current.has_made_all = state
