"""Compiler: compiles functions for the plan of one executor."""

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
    """A compiler of functions for the plan of one executor."""

    @abstractmethod
    def call(
        self,
        function: CompiledFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function, compiled, in the context that the caller is in.

        In cross-replica context, arguments may be per-replica values.
        """

    @abstractmethod
    def run(
        self,
        strategy: RunsReplicas,
        fn: CompiledFunction | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Implements `strategy.run` of, or inside, a compiled function.

        `fn` is a `Function`, or, where `is_tracing`, any callable.
        """

    def call_in_replica(
        self,
        function: CompiledFunction,
        call: CallOfReplica,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a compiled function from a replica function that is not.

        By default replicas wait for each other, and one compiled call runs
        the function for all of them.
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
            strategy: The `Strategy` that runs the function.
            function: The `Function` of one step.
            batches: Sequence with the arguments of each step: per-replica
                values, or tensors with one replica, of equal shapes.

        Returns:
            Nest like the function's result. Each leaf, on each replica, has
            the steps stacked along a new first axis.
        """
        results = [
            snapshot(self.run(strategy, function, each, None))
            for each in batches
        ]
        return stack_steps(strategy, results)

    @property
    def is_tracing(self) -> bool:
        """True while this compiler traces a function in this thread."""
        return False
