"""Distributed values: values with a component on each replica. Their operators
use a replica's own component, and raise outside of replicas."""

import operator
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_dist.core import context
from keras_dist.errors import TraceError

_BINARY = "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"
_OTHERS = "neg", "abs", "lt", "le", "gt", "ge"
_CONVERTING = (round, float, int)
# Not for classes of the framework, whose own code tests for these methods.
_OF_CONTAINERS = (bool, len, iter)


class DistributedValues(ABC):
    """A value with one component for each local replica.

    Variables that are created under a strategy are distributed values too. On
    TensorFlow, native `tf.distribute.DistributedValues` are instances of this
    class.

    Example:

    >>> issubclass(keras_dist.PerReplica, keras_dist.DistributedValues)
    True
    """

    @property
    @abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The components, in replica order."""


class _Components(DistributedValues):
    """A distributed value that holds its components, unlike a variable."""

    _name: str

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        return self._values

    def __repr__(self) -> str:
        return framed(self._name, [repr(v) for v in self.values])

    def __str__(self) -> str:
        return framed(self._name, [str(v) for v in self.values])


class PerReplica(_Components):
    """A value whose components may differ, such as a distributed batch.

    Args:
        values: Sequence with a component for each local replica, any objects.

    Example:

    >>> keras_dist.PerReplica([1.5, 2.5])
    PerReplica:{
      0: 1.5,
      1: 2.5
    }
    """

    _name = "PerReplica"


class Mirrored(_Components):
    """A value whose components are equal, such as a result of `reduce_to`.

    Args:
        values: Sequence with a component for each local replica.

    Example:

    >>> keras_dist.Mirrored([1.5, 1.5]).values
    (1.5, 1.5)
    """

    _name = "Mirrored"


def framed(name: str, components: Sequence[str]) -> str:
    """Formats a distributed value, one line for each component's index."""
    lines = ",\n".join(f"  {i}: {c}" for i, c in enumerate(components))
    return f"{name}:{{\n{lines}\n}}"


def misused(name: str, value: object) -> str:
    """Returns the message for a distributed value used as a tensor."""
    return (
        f"It looks like you are using a {name} object while not inside a "
        f"replica context. Received: {value!r}. Pass it to `strategy.run`, "
        "where each replica gets its own component. Or combine it with "
        "`strategy.reduce` or `strategy.gather`, or read the components "
        "with `strategy.experimental_local_results`."
    )


def own_component(value: Any, name: str) -> tuple[bool, Any]:
    """Returns whether this thread runs a replica, and its component."""
    replica = context.current_replica_context()
    if replica is None:
        return False, None
    plan, values = replica.strategy.plan, value.values
    index = replica.replica_id_in_sync_group
    if not isinstance(index, int):
        raise TraceError(
            f"A compiled function uses a {name} value that was not passed to "
            "it.\nAll replicas run the same program, so the function can't "
            f"tell which replica's component to use. Received: {value!r}. "
            "Expected: an argument. Pass the value in `args` of "
            "`strategy.run`, itself or in a list, tuple or dict. Each "
            "replica then gets its component."
        )
    if len(values) != plan.num_replicas:  # those of this worker only
        index -= plan.first_replica
    return True, values[index]


def add_operators(cls: type, name: str) -> None:
    """Adds all operators to a class of distributed values."""
    given: Any = cls
    for key, method in arithmetic(cls, name).items():
        setattr(cls, key, method)
    given.__getitem__ = _method(operator.getitem, name)
    for do in _OF_CONTAINERS:
        setattr(cls, f"__{do.__name__}__", _method(do, name))

    def with_format(self: Any, spec: str) -> str:
        return str(formatted(self, spec) if spec else self)

    formatted = _method(format, name)
    given.__format__ = with_format


def arithmetic(cls: type, name: str) -> dict[str, Callable[..., Any]]:
    """Returns arithmetic operators that a class, also a framework's, lacks."""
    operators: dict[str, Callable[..., Any]] = {}
    for key in _BINARY:
        do = getattr(operator, key)
        operators |= {f"__{key}__": do, f"__r{key}__": _swapped(do)}
    operators |= {f"__{key}__": getattr(operator, key) for key in _OTHERS}
    operators |= {f"__{convert.__name__}__": convert for convert in _CONVERTING}
    methods = {key: _method(do, name) for key, do in operators.items()}
    methods["__array__"] = _array(name)
    return {
        key: method
        for key, method in methods.items()
        if getattr(cls, key, None) in (None, getattr(object, key, None))
    }


def _swapped(do: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, other: do(other, value)


def _method(do: Callable[..., Any], name: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        in_replica, component = own_component(self, name)
        if not in_replica:
            raise TypeError(misused(name, self))
        return do(component, *others)

    return method


def _array(name: str) -> Callable[..., Any]:
    def __array__(self: Any, dtype: Any = None, copy: Any = None) -> Any:
        in_replica, component = own_component(self, name)
        if not in_replica:
            raise ValueError(misused(name, self))
        return np.asarray(ops.convert_to_numpy(component), dtype=dtype)

    return __array__


add_operators(PerReplica, "PerReplica")
add_operators(Mirrored, "Mirrored")
