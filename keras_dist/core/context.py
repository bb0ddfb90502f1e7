"""The current strategy and replica of each thread, and what it traces."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Protocol

import keras

from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import TraceError


class HasScope(Protocol):
    """A strategy, as far as the current one can be set: it has a scope."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the strategy is current."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.in_replica = False
        self.replica: Any = None
        # What `experimental_set_strategy` entered, and how to leave it.
        self.set_by_call: contextlib.ExitStack | None = None
        self.default_scopes = 0
        # True in cross-replica context of the default strategy.
        self.default_merge = False


_stack = _Stack()


class replaced(contextlib.AbstractContextManager[None]):
    """Sets attributes of an object, such as a thread's, inside the context.

    A class, because each step enters it often, and generators take more calls.
    """

    def __init__(self, owner: object, **values: Any) -> None:
        self._owner = owner
        self._values = values

    def __enter__(self) -> None:
        owner, self._before = self._owner, {}
        for name in self._values:
            self._before[name] = getattr(owner, name)
        for name, value in self._values.items():
            setattr(owner, name, value)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            setattr(self._owner, name, value)


def current_strategy() -> Any:
    """Returns the `Strategy` whose scope this thread is in, or `None`."""
    return _stack.scopes[-1] if _stack.scopes else None


def current_replica_context() -> Any:
    """Returns the `ReplicaContext` of the function this thread runs in."""
    return _stack.replica


def in_replica_function() -> bool:
    """Returns true if this thread runs a replica, in `run` or `fit`."""
    return _stack.in_replica or _stack.replica is not None


def has_strategy() -> bool:
    """Returns true if this thread is inside of a `strategy.scope()`.

    Example:

    >>> keras_dist.has_strategy()
    False
    """
    return bool(_stack.scopes)


def in_cross_replica_context() -> bool:
    """Returns true under `strategy.scope()` and outside of replicas.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0"])
    >>> with strategy.scope():
    ...     keras_dist.in_cross_replica_context()
    True
    """
    return (has_strategy() or _stack.default_merge) and not _stack.in_replica


def experimental_set_strategy(strategy: HasScope | None) -> None:
    """Makes a strategy current for this thread, without a `with`.

    Later code of this thread runs as if under the strategy's scope. A second
    call replaces the strategy.

    Args:
        strategy: A `Strategy`, or `None` for the default one.

    Raises:
        RuntimeError: Inside of a `strategy.scope()`.

    Example:

    >>> keras_dist.experimental_set_strategy(
    ...     keras_dist.OneDeviceStrategy("cpu:0")
    ... )
    >>> keras_dist.has_strategy()
    True
    >>> keras_dist.experimental_set_strategy(None)
    """
    if len(_stack.scopes) > (_stack.set_by_call is not None):
        raise RuntimeError(
            "Must not be called inside a `tf.distribute.Strategy` scope: "
            "`experimental_set_strategy` was called under the scope of "
            f"{current_strategy()!r}. Leave the scope first, or use only one "
            "of the two."
        )
    if _stack.set_by_call is not None:
        before, _stack.set_by_call = _stack.set_by_call, None
        before.close()
    if strategy is not None:
        entered_scope = contextlib.ExitStack()
        entered_scope.enter_context(strategy.scope())
        if has_strategy():
            _stack.set_by_call = entered_scope


@contextlib.contextmanager
def entered(strategy: object) -> Iterator[None]:
    """Makes `strategy` current for this thread, unless another one is."""
    check_same(strategy, "scope")
    _stack.scopes.append(strategy)
    try:
        yield
    finally:
        _stack.scopes.pop()


def left() -> contextlib.AbstractContextManager[None]:
    """Makes this thread leave all scopes for the time of the context."""
    return replaced(_stack, scopes=[])


@contextlib.contextmanager
def default_entered() -> Iterator[None]:
    """Marks the default strategy's scope as open; refused under another's."""
    if has_strategy():
        raise RuntimeError(
            "Must not nest tf.distribute.Strategy scopes: the default "
            "strategy's scope was entered inside of the scope of "
            f"{current_strategy()!r}. Leave that scope first."
        )
    # A number, because scopes in generators may be left in any order.
    _stack.default_scopes += 1
    try:
        yield
    finally:
        _stack.default_scopes -= 1


@contextlib.contextmanager
def default_merging() -> Iterator[None]:
    """Enters the default strategy's cross-replica context, in no scope."""
    with in_replica(None):
        _stack.default_merge = True
        yield


def check_same(strategy: object, what: str) -> None:
    """Raises `StrategyMismatchError` if another strategy is current."""
    outer = current_strategy()
    if outer is not None and outer is not strategy:
        raise StrategyMismatchError(
            "Mixing different tf.distribute-style Strategy objects: "
            f"`{what}` of {strategy!r} was used inside of the scope of "
            f"{outer!r}. Expected: one strategy at a time. "
            + _way_out(strategy, outer)
        )


def _way_out(strategy: object, outer: object) -> str:
    if repr(strategy) != repr(outer):
        return "Leave the outer scope first."
    return (
        "Both have the same description, but they are two objects "
        f"({id(strategy):#x} and {id(outer):#x}). The strategy was made a "
        "second time while the scope of the first one was open, perhaps by a "
        "notebook cell that ran twice. Make the strategy once, and use that "
        "object: `keras_dist.get_strategy()` returns the strategy whose "
        "scope is open. Or close that scope first: leave its `with` block, "
        "or, if `keras_dist.experimental_set_strategy` opened it, call "
        "`keras_dist.experimental_set_strategy(None)`."
    )


def check_no_distribution(strategy: object, what: str) -> None:
    """Refuses `keras.distribution` beside a strategy, used by `what`."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise StrategyMismatchError(
            "`keras.distribution` and a strategy both decide where variables "
            f"and batches are placed.\nReceived: {what} of {strategy!r}, while "
            f"{distribution!r} is set. Expected: only one of the two. Before "
            "you use the strategy, call "
            "`keras.distribution.set_distribution(None)`, or leave "
            "`distribution.scope()`. Or use the distribution without a "
            "strategy."
        )


def check_cross_replica(strategy: object, what: str) -> None:
    """Refuses what can't be done by one replica."""
    # The usual case first, without further calls: it runs in every step.
    current = _stack
    if not current.in_replica and current.replica is None:
        scopes = current.scopes
        if not scopes or scopes[-1] is strategy:
            return
    if in_replica_function():
        hint = {"gather": " To gather there, use its `all_gather()`."}
        raise RuntimeError(
            "Method requires being in cross-replica context, use "
            f"get_replica_context().merge_call(). Received: `{what}` of "
            f"{strategy!r} called in a replica function."
            f"{hint.get(what, '')}"
        )
    check_same(strategy, what)


def check_creation() -> None:
    """Raises `StrategyMismatchError` for a variable under two scopes."""
    if _stack.default_scopes and has_strategy():
        raise StrategyMismatchError(
            "Mixing different tf.distribute-style Strategy objects: a "
            f"variable was made under the scope of {current_strategy()!r} "
            "inside of the default strategy's scope. Leave the default "
            "strategy's scope first."
        )


def in_replica(
    strategy: object | None, replica: object | None = None
) -> contextlib.AbstractContextManager[None]:
    """Marks this thread as running one replica; with `None`, no strategy."""
    return replaced(
        _stack,
        scopes=[] if strategy is None else [strategy],
        in_replica=strategy is not None,
        replica=replica,
        default_merge=False,
    )


def cross_replica(
    strategy: object,
) -> contextlib.AbstractContextManager[None]:
    """Enters a strategy's cross-replica context, from any context."""
    return replaced(
        _stack,
        scopes=[strategy],
        in_replica=False,
        replica=None,
        default_merge=False,
    )


_default: list[Callable[[], Any]] = []


def register_default(make: Callable[[], Any]) -> None:
    """Registers the function that returns the default strategy."""
    _default[:] = [make]


def default_strategy() -> Any:
    """Returns the `Strategy` that is current when no other is."""
    return _default[0]()


class _Tracing(threading.local):
    def __init__(self) -> None:
        self.inlines = False
        # What the program that is traced exchanges between workers, in words.
        self.exchanges: list[str] = []
        # Has an item for each variable that is made.
        self.made: list[None] = []
        # The compiled function that is not to make variables any more.
        self.has_made_all: str | None = None


_tracing = _Tracing()


def inlining() -> contextlib.AbstractContextManager[None]:
    """Makes inner compiled functions part of the one that is being traced."""
    return replaced(_tracing, inlines=True)


def inlines() -> bool:
    """Returns true while this thread traces a compiled function."""
    return _tracing.inlines


@contextlib.contextmanager
def noting_exchanges() -> Iterator[list[str]]:
    """Yields the list of what programs that are traced inside exchange."""
    exchanges: list[str] = []
    with replaced(_tracing, exchanges=exchanges):
        yield exchanges


def note_exchange(words: str) -> None:
    """Notes what workers exchange in the program that is being traced."""
    _tracing.exchanges.append(words)


@contextlib.contextmanager
def noting_variables() -> Iterator[list[None]]:
    """Yields a list that has an item for each variable that is made inside."""
    made: list[None] = []
    with replaced(_tracing, made=made):
        yield made


def refusing_variables(
    name: str | None,
) -> contextlib.AbstractContextManager[None]:
    """Makes `check_made_in_time` raise for the function of this name."""
    return replaced(_tracing, has_made_all=name)


def check_made_in_time() -> None:
    """Notes a new variable; raises `TraceError` under `refusing_variables`."""
    _tracing.made.append(None)
    if _tracing.has_made_all is not None:
        raise creation_error(_tracing.has_made_all)


def creation_error(name: str) -> TraceError:
    """Returns the error for a function that creates variables too late."""
    return TraceError(
        f"The compiled function '{name}' made a `keras.Variable` after its "
        "first call, or each time it is traced. Expected: variables, layers, "
        "metrics and optimizers that are made once, outside of the function "
        "or in its first call. Some objects make variables when they are "
        "first used: build them before, with `model.build(shape)` or "
        "`optimizer.build(model.trainable_variables)`."
    )


def tracing_state() -> dict[str, Any]:
    """Returns this thread's state for a helper thread to `inherit_tracing`."""
    return dict(vars(_tracing))


def inherit_tracing(state: dict[str, Any]) -> None:
    """Sets this thread's state to the `tracing_state` of another thread."""
    vars(_tracing).update(state)
