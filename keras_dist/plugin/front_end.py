"""Names by which a backend reaches the front end, which it does not import."""

import functools
import types
import weakref
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any
from typing import Protocol

import keras

from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks

# The methods of a model that run one step of `fit`, `evaluate` and `predict`.
STEPS = ("train_step", "test_step", "predict_step")
# The attribute of such a method that stands for a model's own.
REPLICATED = "_keras_dist_replicated"
# The attribute of a model that holds what `bound` returns.
BOUND = "_keras_dist_binding"


def bound(model: keras.Model) -> Any:
    """Returns a model's link to its strategy; `None` for a plain model."""
    return model.__dict__.get(BOUND)


def is_replicated(method: object) -> bool:
    """Returns whether a step runs a model's own on replicas."""
    return hasattr(method, REPLICATED)


_tables: list[Callable[[], Iterable[Hook]]] = []
# The front end's table, and the backend's.
HOOKS = Hooks(lambda: _tables[0]())


def register_hooks(table: Callable[[], Iterable[Hook]]) -> None:
    """Registers the function that returns the rows of `HOOKS`."""
    _tables[:] = [table]


class RunsReplicas(Protocol):
    """A `Strategy`: it calls functions on replicas."""

    @property
    def plan(self) -> Any:
        """The `Plan`."""

    @property
    def executor(self) -> Any:
        """The `Executor` of the plan."""

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the components of a value."""


class CompiledFunction:
    """A function that is compiled; `keras_dist.function` makes it."""

    def __init__(
        self,
        python_function: Callable[..., Any],
        jit_compile: bool | None = None,
        key: object | None = None,
    ) -> None:
        wrapper: Any = self
        functools.update_wrapper(wrapper, python_function)
        self.python_function = python_function
        self.jit_compile = jit_compile
        # In caches, it lives as long as what was compiled is worth keeping.
        self.key = self if key is None else key

    @property
    def name(self) -> str:
        """Its name in messages and profiles."""
        return getattr(self.python_function, "__name__", "function")

    def held_weakly(self) -> Callable[..., Any]:
        """Returns the Python function; a method's instance is held weakly."""
        if not isinstance(self.python_function, types.MethodType):
            return self.python_function
        method = weakref.WeakMethod(self.python_function)

        def call(*args: Any, **kwargs: Any) -> Any:
            alive = method()
            assert alive is not None  # whoever calls it holds it
            return alive(*args, **kwargs)

        return call


class CallOfReplica(Protocol):
    """The call of a replica function, of the replica that this thread runs."""

    strategy: Any
    replica: Any

    def sync(
        self, what: str, fn: Callable[[list[Any]], Any], value: object
    ) -> Any:
        """Calls `fn` once with each replica's `value`; returns its result."""


class StepsOfData(ABC):
    """Base of distributed datasets, over which a traced `for` loop can go."""

    @abstractmethod
    def reduce(
        self, initial_state: object, reduce_func: Callable[[Any, Any], Any]
    ) -> Any:
        """Carries a state through `reduce_func(state, batch)`."""
