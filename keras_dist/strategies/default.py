"""The default strategy, current outside of all scopes."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import final

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.core.device import Device
from keras_dist.core.options import InputContext
from keras_dist.core.options import InputOptions
from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.compiler import Compiler
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.storage import Storage
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.strategies.extended import StrategyExtended
from keras_dist.strategies.strategy import Strategy


class DefaultStorage(Storage):
    """The storage of a variable that stays where Keras puts it."""

    devices = ()

    def place(self) -> None:
        pass

    def read(self, index: int) -> Any:
        return self.variable.value


class DefaultExecutor(Executor):
    """An executor that leaves everything where Keras puts it."""

    @functools.cached_property
    def compiler(self) -> Compiler | None:  # type: ignore[override]
        return get_backend().compiler()

    def storage(self, variable: keras.Variable) -> Storage:
        return DefaultStorage(variable)

    def put(self, value: object, device: Device) -> Any:
        return ops.convert_to_tensor(value)


@final
class DefaultExtended(StrategyExtended):
    """The `StrategyExtended` of the default strategy, which has no devices."""

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Raises `RuntimeError`, since Keras chooses the device."""
        raise _no_devices("worker_devices")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Raises `RuntimeError`, since Keras chooses the device."""
        raise _no_devices("parameter_devices")

    def read_var(self, v: keras.Variable) -> Any:
        """Returns a copy of a variable's value."""
        return ops.copy(v.value)

    def non_slot_devices(self, var_list: object) -> tuple[str, ...]:
        """Returns an empty tuple, since Keras chooses the device."""
        return ()


def _no_devices(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}() method unsupported by default strategy: Keras chooses the "
        "device. Use a `keras_dist.OneDeviceStrategy` to choose it yourself."
    )


@final
class DefaultStrategy(Strategy):
    """Plain Keras as a strategy; it never initializes a device."""

    def __init__(self) -> None:
        device = Device("cpu", 0)
        plan = Plan(((device,),), (device,))
        StrategyBase.__init__(self, plan, DefaultExecutor(plan))

    @property
    def if_current(self) -> None:
        """`None`, since functions that it runs are in no strategy's scope."""
        return None

    @contextlib.contextmanager
    def cross_replica(self) -> Iterator[None]:
        """Enters the default cross-replica context, in no strategy's scope."""
        with context.default_merging():
            yield

    @contextlib.contextmanager
    def _entered_scope(self) -> Iterator[Strategy]:
        # `scope` is inherited, so that this one too can be entered again.
        with context.default_entered():
            yield self

    def distribute(self, model: keras.Model) -> keras.Model:
        """Returns the model as it is."""
        return model

    @property
    def extended(self) -> DefaultExtended:
        """The `StrategyExtended`, which has no devices."""
        return DefaultExtended(self)

    def devices_of(self, variable: keras.Variable) -> tuple[str, ...]:
        """Returns an empty tuple, since Keras chooses the device."""
        return ()

    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> Any:
        """Returns the dataset as it is."""
        return dataset

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Returns the dataset that `dataset_fn` makes."""
        return dataset_fn(InputContext())

    def __repr__(self) -> str:
        return "<DefaultStrategy>"


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the only instance of `DefaultStrategy`."""
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """Returns the strategy whose scope is open in this thread.

    Without an open scope, this is the default strategy.

    Example:

    >>> keras_dist.get_strategy()
    <DefaultStrategy>
    """
    strategy: Strategy = context.current_strategy() or default_strategy()
    return strategy
