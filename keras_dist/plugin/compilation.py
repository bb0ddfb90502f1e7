"""Compiler: what an executor gives to functions that are compiled."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras_dist.core.regroup import regroup
from keras_dist.plugin.front_end import CallOfReplica
from keras_dist.plugin.front_end import CompiledFunction
from keras_dist.plugin.front_end import RunsReplicas
from keras_dist.plugin.steps_in_one import snapshot
from keras_dist.plugin.steps_in_one import stack_steps


class Compiler(ABC):
    """Compiles functions for the plan of one executor."""

    @abstractmethod
    def call(
        self,
        function: CompiledFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function, compiled, in the context that the caller is in.

        Args:
            function: The `Function`.
            args: Its positional arguments; per-replica values are among them
                where it is called in cross-replica context.
            kwargs: Its keyword arguments.
        """

    @abstractmethod
    def run(
        self,
        strategy: RunsReplicas,
        fn: CompiledFunction | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """`strategy.run` of a compiled function, or in the midst of one.

        Args:
            strategy: The `Strategy`.
            fn: A `Function`; or any callable where `is_tracing`.
            args: Positional arguments, as `strategy.run` takes them.
            kwargs: Keyword arguments, likewise.
        """

    def call_in_replica(
        self,
        function: CompiledFunction,
        call: CallOfReplica,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function in a replica function that is not compiled.

        By default replicas meet, and it runs once compiled, for all of them.

        Args:
            function: The `Function`.
            call: The `ReplicaCall` of this thread.
            args: This replica's positional arguments.
            kwargs: This replica's keyword arguments.
        """
        strategy: Any = call.strategy

        def run_together(everyone: list[Any]) -> Any:
            args, kwargs = regroup(everyone, strategy.executor.per_replica)
            return self.run(strategy, function, args, kwargs)

        what = f"the compiled function '{function.name}'"
        result = call.together(what, run_together, (args, kwargs))
        return call.replica.own(result)

    def scan(
        self,
        strategy: RunsReplicas,
        function: CompiledFunction,
        batches: Sequence[tuple[Any, ...]],
    ) -> Any:
        """Runs a function for one batch after another.

        Args:
            strategy: The `Strategy`.
            function: The `Function`.
            batches: Sequence of the arguments of each step: per-replica
                values, with one replica tensors, of equal shapes.

        Returns:
            The nest that it returned, each leaf (of each replica) with the
            steps stacked along a new first axis.
        """
        results = [
            snapshot(self.run(strategy, function, each, None))
            for each in batches
        ]
        return stack_steps(strategy, results)

    @property
    def is_tracing(self) -> bool:
        """Whether `run` in this thread is part of a function it traces."""
        return False
