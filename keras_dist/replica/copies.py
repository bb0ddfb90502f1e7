"""Calls a function once for each copy of a variable."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import keras
import numpy as np

from keras_dist.core.components import VariableComponent
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals import keras_internals
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaRunner
from keras_dist.replica.call import ReplicaCall
from keras_dist.replica.state import Writes
from keras_dist.replica.state import current_call
from keras_dist.replica.state import set_current_call
from keras_dist.replica.variables import DistributedVariable
from keras_dist.replica.variables import written

if TYPE_CHECKING:
    from keras_dist.replica.strategy_core import StrategyBase


class CopyCall(ReplicaCall):
    """One replica's reads and writes in an update of each copy of a variable.

    The update runs in cross-replica context. Nothing that it writes is
    combined: each copy gets its own value, and copies of a mirrored variable
    have to be equal in the end.
    """

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        before = current_call()
        with self.strategy.cross_replica():
            set_current_call(self)
            try:
                yield
            finally:
                set_current_call(before)

    def read(self, variable: keras.Variable) -> Any:
        if isinstance(variable, DistributedVariable):
            return variable.component_value(self.replica.index)
        return None

    def write(self, variable: keras.Variable, value: Any) -> None:
        if isinstance(variable, DistributedVariable):
            self.scope.state_mapping[id(variable)] = value
            self.writes[id(variable)] = (variable, value)
        else:
            with self.suspended():
                variable.assign(value)

    def assign(self, variable: Any, method: str, value: Any) -> Any:
        return keras.Variable.assign(variable, written(variable, method, value))

    def _agreed(self, variable: Any, values: Sequence[Any]) -> Any:
        def error() -> Exception:
            each = [
                np.array2string(keras.ops.convert_to_numpy(v), threshold=6)
                for v in values
            ]
            return ReplicaDivergenceError(
                f"An update left the copies of variable '{variable.path}' "
                f"different. Received: {each}. Expected: the same value for "
                "each copy. Combine what you pass to the update first, with "
                "`strategy.extended.reduce_to`, or make the variable with "
                "`synchronization='on_read'`."
            )

        executor = self.strategy.executor
        executor.check_equal(values, error)
        return executor.mirror(values[0])


class CopyVariable(VariableComponent):
    """One replica's component of a variable, read and written in an update."""

    def __init__(self, container: Any, index: int, call: CopyCall) -> None:
        super().__init__(container, index)
        self._call = call

    @property
    def _is_in_update(self) -> bool:
        return keras_internals.stateless_scope() is self._call.scope

    @property
    def value(self) -> Any:
        return self.container.value if self._is_in_update else super().value

    def assign(self, value: Any) -> Any:
        if self._is_in_update:
            return keras.Variable.assign(self.container, value)
        return super().assign(value)


def run_on_copies(
    strategy: "StrategyBase",
    runner: ReplicaRunner,
    fn: Callable[[int, CopyCall], Any],
) -> list[Any]:
    """Calls `fn(index, call)` for each replica's copies, on its device.

    `call` is the `CopyCall` of the replica.

    Returns:
        List of its results, in replica order.
    """

    def on_replica(replica: Replica) -> Any:
        with CopyCall(replica, runner, strategy) as call:
            result = fn(replica.index, call)

            def end(everyone: list[Writes]) -> None:
                call.commit(everyone, [])

            replica.meet("the end of the update", end, call.writes)
            return result

    return runner.call(on_replica)
