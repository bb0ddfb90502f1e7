"""Strategy: the public class that distributes models by a plan."""

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any
from typing import NoReturn

import keras

from keras_dist.core import context
from keras_dist.core.plan import Plan
from keras_dist.core.strategy_classes import check_arguments
from keras_dist.core.strategy_classes import scope_method
from keras_dist.fit.binding import bind_model
from keras_dist.fit.binding import claim_variable
from keras_dist.fit.hooks import watch_training
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import executor_of
from keras_dist.strategies.cross_device_ops import CrossDeviceOps
from keras_dist.strategies.deprecated import DeprecatedMethods
from keras_dist.strategies.extended import StrategyExtended
from keras_dist.strategies.training_methods import TrainingMethods


class _OpenedScopes(threading.local):
    def __init__(self) -> None:
        # Each with the device that was the default one inside, and with
        # the session that knew it.
        self.managers: list[tuple[Any, Any, object]] = []


class Scope(contextlib.AbstractContextManager["Strategy"]):
    """A strategy's scope; it can be entered again, nested, in any thread."""

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy
        self._opened = _OpenedScopes()

    def __enter__(self) -> "Strategy":
        manager = self._strategy._entered_scope()
        strategy = manager.__enter__()
        device = self._strategy.executor.default_device()
        self._opened.managers.append(
            (manager, device, keras_internals.session())
        )
        return strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        manager, device, session = self._opened.managers[-1]
        now = self._strategy.executor.default_device()
        # Keras' session may hold the default device; clearing the session
        # then resets it.
        is_forgotten = now is None and session is not keras_internals.session()
        if kind is None and now != device and not is_forgotten:
            raise RuntimeError(
                "Device scope nesting error: a device scope that was opened "
                "inside of `strategy.scope()` is still open. Received: "
                f"{now!r} is the default device. Expected: {device!r}. Leave "
                "the inner `with` first."
            )
        self._opened.managers.pop()
        suppresses: bool | None = manager.__exit__(kind, error, traceback)
        return suppresses


class Strategy(DeprecatedMethods, TrainingMethods):
    """A distribution of computation and variables over devices.

    Use one of the subclasses, or pass your own `Plan`.

    Args:
        plan: A `Plan` of the devices that compute and hold variables.
        cross_device_ops: A `CrossDeviceOps`, or `None` for the backend's own.

    Example:

    >>> from keras_dist.plugins import Device, Plan
    >>> cpu = Device("cpu", 0)
    >>> strategy = keras_dist.Strategy(Plan(((cpu,),), (cpu,)))
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self, plan: Plan, cross_device_ops: CrossDeviceOps | None = None
    ) -> None:
        super().__init__(plan, executor_of(plan), cross_device_ops)
        watch_training(self)

    @staticmethod
    def from_native(strategy: Any) -> "Strategy":
        """Creates a strategy with the devices of a native strategy.

        The two strategies use the same devices, but share no variables.

        Args:
            strategy: On TensorFlow, a `tf.distribute.MirroredStrategy` or
                `tf.distribute.OneDeviceStrategy`.

        Returns:
            A `Strategy` with the same replicas and devices.

        Raises:
            TypeError: If `strategy` is any other object, such as a
                `tf.distribute.TPUStrategy`, or if the backend has no native
                strategies.
        """
        return Strategy(get_backend().plan_of_native(strategy))

    def __new__(cls, *args: Any, **kwargs: Any) -> "Strategy":
        check_arguments(cls, args, kwargs)
        return super().__new__(cls)

    @scope_method
    def scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        """Returns a context that distributes models, optimizers, variables.

        The strategy distributes those that are made in the context. A model
        remembers its strategy, so you can call its methods, such as `fit`,
        inside or outside of the scope, in any thread.

        Returns:
            A context manager that yields the strategy. It can be nested and
            entered again.

        Raises:
            StrategyMismatchError: If another strategy's scope is open.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        """
        return Scope(self)

    @contextlib.contextmanager
    def _entered_scope(self) -> Iterator["Strategy"]:
        context.check_no_distribution(self, "the scope")
        with (
            keras_random.global_seed_lent(),
            context.entered(self),
            self.executor.hooks,
            self.executor.creation_scope(),
        ):
            yield self

    def distribute(self, model: keras.Model) -> keras.Model:
        """Brings a model made outside of the scope under this strategy.

        The values of its variables stay the same.

        Args:
            model: A `keras.Model`, built or not, compiled or not.

        Returns:
            The same model.

        Raises:
            StrategyMismatchError: If the model belongs to another strategy.

        Example:

        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> strategy = keras_dist.MirroredStrategy(["cpu:0"])
        >>> strategy.distribute(model) is model
        True
        """
        if not isinstance(model, keras_internals.Trainer):
            raise ValueError(
                "`distribute` takes a `keras.Model`. Received: "
                f"{model!r} of type {type(model).__name__}."
            )
        bind_model(model, self).claim()
        return model

    def devices_of(self, variable: keras.Variable) -> tuple[str, ...]:
        """Returns the names of the devices that hold a copy of a variable.

        Args:
            variable: A `keras.Variable` that belongs to this strategy.

        Returns:
            Tuple of strings such as `("cpu:0", "cpu:1")`. The first is the
            primary device, whose copy is saved.

        Raises:
            StrategyMismatchError: If the variable belongs to another strategy.

        Example:

        >>> strategy = keras_dist.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     variable = keras.Variable(1.0)
        >>> strategy.devices_of(variable)
        ('cpu:0',)
        """
        claim_variable(variable, self)
        return tuple(map(str, self.executor.home(variable).devices))

    @property
    def extended(self) -> StrategyExtended:
        """The `StrategyExtended`: methods that few programs need."""
        return StrategyExtended(self)

    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Calls `extended.colocate_vars_with`; this is its old name."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    @property
    def cluster_resolver(self) -> Any:
        """The `ClusterResolver` in use; `None` on one worker."""
        return None

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "A strategy is not a context manager, but its scope is. "
            f"Received: `with` of {self!r}. Expected: `with "
            "strategy.scope():`."
        )

    def __exit__(self, *error: object) -> None:
        """Never runs, since `__enter__` raises."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A strategy can't be pickled: it stands for the devices of this "
            f"process. Received: {self!r}. Expected: a strategy made in each "
            "process. Call its constructor there. To pass a model, save it "
            "with `model.save(path)`, and load it in the scope, with "
            "`keras.models.load_model(path)`."
        )

    def __copy__(self) -> "Strategy":
        raise RuntimeError(
            f"Must only deepcopy a strategy. Received: copy.copy({self!r}). "
            "Use the strategy itself, or make another one."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        # The copy of a model, for instance, belongs to the same strategy.
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.plan}>"
