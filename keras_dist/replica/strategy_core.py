"""StrategyBase: a strategy as the layers below it know it."""

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.core.options import InputContext
from keras_dist.core.plan import Plan
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.values import PerReplica
from keras_dist.plugin.executor import Executor


class StrategyBase:
    """A plan, its executor, and optional `CrossDeviceOps`; methods that
    `Strategy` has are declared."""

    # Whether the user named the one device that computes.
    names_its_device = False

    def __init__(
        self, plan: Plan, executor: Executor, cross_device_ops: Any = None
    ) -> None:
        # The strategy's `Plan`, and the backend's `Executor` bound to it.
        # Attributes, because each step asks for them often.
        self.plan = plan
        self.executor = executor
        self._cross_device_ops = cross_device_ops
        # True once the strategy has run a function or a model's steps.
        self.has_run = False
        # Number of optimizer updates before that.
        self.num_lone_updates = 0
        # Variables with components, by id.
        self.has_components: weakref.WeakValueDictionary[
            int, keras.Variable
        ] = weakref.WeakValueDictionary()

    @property
    def cross_device_ops(self) -> Any:
        """The user's `CrossDeviceOps`; `None` if the executor reduces."""
        return self._cross_device_ops

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the strategy is current."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `fn` once for each replica."""

    @abstractmethod
    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the components of a value."""

    @property
    def extended(self) -> Any:
        """Methods that few programs need."""

    @abstractmethod
    def experimental_distribute_dataset(self, dataset: object) -> Any:
        """Splits the batches of a dataset over the replicas."""

    @abstractmethod
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Any:
        """Distributes the batches of datasets that a function makes."""

    @abstractmethod
    def experimental_make_numpy_dataset(
        self, numpy_input: object, session: object = None
    ) -> Any:
        """Makes a dataset of the rows of arrays."""

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        """Combines the replicas' values of one shape to one on the primary."""
        if self._cross_device_ops is None:
            return self.executor.combine(op, values)
        with self.cross_replica():
            reduced = self._cross_device_ops.reduce(
                op, PerReplica(values), str(self.plan.primary)
            )
        return self.executor.mirror(reduced)

    def combine_all(
        self, op: ReduceOp, values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Combines several values at once, each given as for `combine`."""
        if self._cross_device_ops is None:
            return self.executor.combine_all(op, values)
        primary = str(self.plan.primary)
        with self.cross_replica():
            reduced = self._cross_device_ops.batch_reduce(
                op, [(PerReplica(components), primary) for components in values]
            )
        return [self.executor.mirror(value) for value in reduced]

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are combined."""
        return self.plan.num_replicas

    @property
    def if_current(self) -> "StrategyBase | None":
        """The current strategy in functions that this strategy runs: itself."""
        return self

    def cross_replica(self) -> contextlib.AbstractContextManager[None]:
        """Enters this strategy's cross-replica context, from any context."""
        return context.cross_replica(self)
