"""Checks for common mistakes in calls of a strategy's methods."""

import functools
import inspect
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn


def check_arguments(
    cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises `TypeError` if arguments don't fit a strategy's constructor."""
    made: Any = cls
    signature = inspect.signature(functools.partial(made.__init__, None))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        expected = str(signature).split(" -> ")[0]
        raise TypeError(
            f"{cls.__name__} can't be made: {error}.\nExpected: "
            f"{cls.__name__}{expected}. For several replicas, pass the name "
            'of each device, as in `MirroredStrategy(["gpu:0", "gpu:1"])`. '
            "Without arguments, the strategy uses all devices that "
            "`keras_dist.list_devices()` returns. "
            "`keras_dist.set_virtual_devices(2)` makes two devices of the "
            "CPU."
        ) from None


def check_args(args: object) -> None:
    """Raises `ValueError` unless `args` is a list or a tuple."""
    if not isinstance(args, (list, tuple)):
        raise ValueError(
            "positional args must be a list or tuple. Received: "
            f"args={args!r} of type {type(args).__name__}. Pass "
            "`args=(value,)` for one argument."
        )


class _BoundScope:
    """`strategy.scope` before it is called; `with` on it raises."""

    def __init__(self, method: Callable[..., Any], strategy: object) -> None:
        functools.update_wrapper(self, method)
        self._method = method
        self._strategy = strategy

    def __call__(self) -> Any:
        return self._method(self._strategy)

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "`scope` is a method. Received: `with strategy.scope:`. Expected: "
            "`with strategy.scope():`, with parentheses."
        )

    def __exit__(self, *error: object) -> None:
        """Never runs, since `__enter__` raises."""


class scope_method:
    """A decorator of `scope` that detects `with strategy.scope:`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        wrapper: Any = self
        functools.update_wrapper(wrapper, method)
        self._method = method

    def __get__(self, strategy: object, owner: type | None = None) -> Any:
        if strategy is None:
            return self._method
        return _BoundScope(self._method, strategy)
