"""What a strategy's methods build on: its plan and its executor."""

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.core.plan import Plan
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import Reducer
from keras_dist.core.values import PerReplica
from keras_dist.plugin.executor import Executor


class StrategyBase:
    """A plan, and the executor that is bound to it.

    Args:
        plan: A `Plan`.
        executor: The `Executor` for it.
        cross_device_ops: The `CrossDeviceOps` that combine replicas' values,
            or `None` for the executor's own way.
    """

    # Whether the user named the one device that computes.
    names_its_device = False

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        cross_device_ops: Reducer | None = None,
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._cross_device_ops = cross_device_ops
        # Whether it ran anything yet: a function, or the steps of a model.
        self.has_run = False
        # How often an optimizer was applied before.
        self.num_lone_updates = 0
        # Variables that replicas have values of their own of.
        self.has_components: weakref.WeakValueDictionary[
            int, keras.Variable
        ] = weakref.WeakValueDictionary()

    @property
    def plan(self) -> Plan:
        """The `Plan` this strategy made."""
        return self._plan

    @property
    def executor(self) -> Executor:
        """The backend's `Executor` bound to the plan."""
        return self._executor

    @property
    def cross_device_ops(self) -> Reducer | None:
        """What combines replicas' values, if that is not the executor."""
        return self._cross_device_ops

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the strategy is current."""

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        """Combines tensors of one shape; the result is where variables are.

        Args:
            op: `ReduceOp`.
            values: Sequence with each replica's tensor or number.

        Raises:
            ValueError: If shapes differ.
        """
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
        """Combines several values at once.

        Args:
            op: `ReduceOp`.
            values: Sequence with, for each value, what `combine` takes.
        """
        if self._cross_device_ops is None:
            return self.executor.combine_all(op, values)
        primary = str(self.plan.primary)
        with self.cross_replica():
            reduced = self._cross_device_ops.batch_reduce(
                op, [(PerReplica(each), primary) for each in values]
            )
        return [self.executor.mirror(each) for each in reduced]

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are combined."""
        return self.plan.num_replicas

    @property
    def if_current(self) -> "StrategyBase | None":
        """What is current in the functions that it runs: itself."""
        return self

    @contextlib.contextmanager
    def cross_replica(self) -> Iterator[None]:
        """Cross-replica context of this strategy, whatever was before."""
        with context.in_replica(None), context.entered(self):
            yield
