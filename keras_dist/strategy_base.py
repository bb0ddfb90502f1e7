"""What a strategy's methods build on: its plan and its executor."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keras_dist import context
from keras_dist.backend import Executor
from keras_dist.plan import Plan
from keras_dist.variables import SyncOnReadVariable

if TYPE_CHECKING:
    pass


class StrategyBase:
    """A plan, and the executor that is bound to it.

    Args:
        plan: A `Plan`.
        executor: The `Executor` for it.
    """

    def __init__(self, plan: Plan, executor: Executor) -> None:
        self._plan = plan
        self._executor = executor
        # Variables that replicas have values of their own of.
        self.has_components: weakref.WeakValueDictionary[
            int, SyncOnReadVariable
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
