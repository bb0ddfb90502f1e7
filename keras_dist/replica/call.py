"""`ReplicaCall`: one replica of a function under `strategy.run`."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras

from keras_dist.core import context
from keras_dist.core.components import VariableComponent
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.rows import RowShard
from keras_dist.core.values import PerReplica
from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.internals.keras_internals import opened
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist.replica.adoption import check_owner
from keras_dist.replica.aggregation import aggregate
from keras_dist.replica.aggregation import agreed_value
from keras_dist.replica.aggregation import equal_value
from keras_dist.replica.aggregation import set_all_components
from keras_dist.replica.on_read import SyncOnReadVariable
from keras_dist.replica.replica_context import ReplicaContext
from keras_dist.replica.state import ReplicaState
from keras_dist.replica.state import Writes
from keras_dist.replica.state import calling
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.replica.variables import DistributedVariable
from keras_dist.replica.variables import MirroredVariable
from keras_dist.replica.variables import written

T = TypeVar("T")


class ReplicaCall(ReplicaState):
    """One replica's reads and writes of variables in a replica function."""

    def __init__(
        self, replica: Replica, runner: ReplicaRunner, strategy: StrategyBase
    ) -> None:
        super().__init__(replica, runner, strategy)
        self.context = ReplicaContext(strategy, replica.id, replica)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with context.in_replica(self.strategy, self.context), calling(self):
            yield

    def read(self, variable: keras.Variable) -> Any:
        check_owner(variable, self.strategy)
        if isinstance(variable, SyncOnReadVariable):
            return variable.component_value(self.replica.index)
        if isinstance(variable, MirroredVariable):
            return self.replica.read(variable)
        return None

    def write(self, variable: keras.Variable, value: object) -> None:
        check_owner(variable, self.strategy)
        if not isinstance(variable, (MirroredVariable, SyncOnReadVariable)):
            with opened(None):
                variable.assign(value)
        elif isinstance(variable, SyncOnReadVariable):
            self.replica.check_write(variable)
            self.scope.state_mapping[id(variable)] = value
            self.writes[id(variable)] = (variable, value)
        else:
            stored = self.replica.hold(variable, value)
            if stored is not None:  # `None`: it was written in place
                self.scope.state_mapping[id(variable)] = value = stored
            self.writes[id(variable)] = (variable, value)

    def assign(
        self, variable: MirroredVariable, method: str, value: object
    ) -> Any:
        """Assigns the replicas' values, combined by `variable.aggregation`."""
        check_owner(variable, self.strategy)
        if isinstance(value, PerReplica):
            value = value.values[self.replica.index]

        def assign_once(values: list[Any]) -> None:
            combined = aggregate(variable, values)
            getattr(variable, method)(combined)

        self.replica.rendezvous(
            f"`{method}` of variable '{variable.path}'", assign_once, value
        )
        self.forget([variable])
        return variable.value

    def sync(
        self, what: str, fn: Callable[[list[Any]], Any], value: object
    ) -> Any:
        """Meets the other replicas, puts in place what they wrote, and calls
        `fn` once with all values, in cross-replica context."""

        def commit_first(everyone: list[Any]) -> Any:
            values, writes = zip(*everyone, strict=True)
            self.commit(writes, [])
            self.replica.committed()
            return fn(list(values))

        result = self.replica.rendezvous(
            what, commit_first, (value, self.writes)
        )
        self.writes.clear()
        self.scope.state_mapping.clear()
        return result

    def finish(self, what: str) -> None:
        """Meets the other replicas to give variables their last values."""
        self.sync(what, lambda values: None, None)

    def check_update(
        self,
        changed: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
    ) -> None:
        for variable in changed:
            check_owner(variable, self.strategy)
        for variable in trained:
            # The framework's own variables, such as a `tf.Variable`, may be.
            is_keras = isinstance(variable, keras.Variable)
            if is_keras and "distribute_strategy" not in vars(variable):
                raise StrategyMismatchError(
                    f"Variable '{variable.path}' was made outside of any "
                    "scope, but is trained in a function that "
                    f"{self.strategy!r} runs. Expected: a variable of that "
                    "strategy. Make the model inside of `with "
                    "strategy.scope():`, or adopt it with "
                    "`strategy.distribute(model)`."
                )

    def commit(
        self, writes: Sequence[Writes], shares: Sequence[RowShard]
    ) -> None:
        written: dict[int, Any] = {
            key: replica_writes[key][0]
            for replica_writes in writes
            for key in replica_writes
        }
        agreed, on_read = [], []
        for key, variable in written.items():
            values = [
                replica_writes[key][1]
                if key in replica_writes
                else variable.component_value(index)
                for index, replica_writes in enumerate(writes)
            ]
            if isinstance(variable, SyncOnReadVariable):
                on_read.append((variable, values))
            else:
                agreed.append((variable, self._agreed(variable, values)))
        # Assigned after the loop, so that an error in it changes no variable.
        for variable, value in agreed:
            variable.assign(value)
        set_all_components(on_read)

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        if self.strategy.cross_device_ops is None:
            return super().sum_gradients(gradients, weights, variables)
        columns = [
            [gradient for gradient in column if gradient is not None]
            for column in zip(*gradients, strict=True)
        ]
        sums = iter(
            self.strategy.combine_all(ReduceOp.SUM, [c for c in columns if c])
        )
        return [next(sums) if column else None for column in columns]

    def _agreed(self, variable: keras.Variable, values: Sequence[Any]) -> Any:
        """Returns a mirrored variable's new value, given each replica's."""
        return agreed_value(variable, values)


def run_on_replicas(
    strategy: StrategyBase, runner: ReplicaRunner, fn: Any
) -> list[Any]:
    """Calls `fn(index)` for each replica, in replica context."""

    def on_replica(replica: Replica) -> Any:
        with ReplicaCall(replica, runner, strategy) as call:
            result = fn(replica.index)
            check_scope(call)
            call.finish("the end of the replica function")
            return result

    return runner.call(on_replica)


def check_scope(call: ReplicaCall) -> None:
    """Refuses a replica function that removed its replica's scope."""
    if keras_internals.stateless_scope() is not call.scope:
        raise UnsupportedModelError(
            "Keras no longer knows which replica runs, so assignments to "
            "variables were not combined over the replicas.\nReceived: a "
            "function under `strategy.run` that called "
            "`keras.utils.clear_session()`, or left a `keras.StatelessScope` "
            "open. Expected: a function that does neither. Clear the session "
            "outside of `run`, and close the scope."
        )


def run_on_one(strategy: StrategyBase, fn: Any) -> Any:
    """Calls `fn(0)` in replica context for a strategy with one replica."""
    with (
        strategy.executor.creation_scope(),
        context.in_replica(strategy.if_current, ReplicaContext(strategy, 0)),
    ):
        return fn(0)


class CopyCall(ReplicaCall):
    """One replica's reads and writes in an update of a variable's copies."""

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self.strategy.cross_replica(), calling(self):
            yield

    def read(self, variable: keras.Variable) -> Any:
        if isinstance(variable, DistributedVariable):
            return variable.component_value(self.replica.index)
        return None

    def write(self, variable: keras.Variable, value: object) -> None:
        if isinstance(variable, DistributedVariable):
            self.scope.state_mapping[id(variable)] = value
            self.writes[id(variable)] = (variable, value)
        else:
            with opened(None):
                variable.assign(value)

    def assign(
        self, variable: keras.Variable, method: str, value: object
    ) -> Any:
        return keras.Variable.assign(variable, written(variable, method, value))

    def _agreed(self, variable: keras.Variable, values: Sequence[Any]) -> Any:
        return equal_value(
            variable,
            values,
            "An update left different values in the copies of variable "
            f"'{variable.path}'",
            "the same value for each copy. First combine the values that you "
            "pass to the update, with `strategy.extended.reduce_to`. Or make "
            "the variable with `synchronization='on_read'`.",
        )


class CopyVariable(VariableComponent):
    """One replica's component of a variable, read and written in an update."""

    def __init__(self, container: object, index: int, call: CopyCall) -> None:
        super().__init__(container, index)
        self._call = call

    @property
    def _is_in_update(self) -> bool:
        return keras_internals.stateless_scope() is self._call.scope

    @property
    def value(self) -> Any:
        return self.container.value if self._is_in_update else super().value

    def assign(self, value: object) -> Any:
        if self._is_in_update:
            return keras.Variable.assign(self.container, value)
        return super().assign(value)


def run_on_copies(
    strategy: StrategyBase,
    runner: ReplicaRunner,
    fn: Callable[[int, CopyCall], Any],
) -> list[Any]:
    """Calls `fn(index, call)` for each replica's copies, on its device."""

    def on_replica(replica: Replica) -> Any:
        with CopyCall(replica, runner, strategy) as call:
            result = fn(replica.index, call)
            call.finish("the end of the update")
            return result

    return runner.call(on_replica)
