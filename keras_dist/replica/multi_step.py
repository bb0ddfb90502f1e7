"""The context of `extended.experimental_run_steps_on_iterator`."""

from typing import Any
from typing import final

from keras_dist.core import context
from keras_dist.core.reduction import ReduceOp


@final
class MultiStepContext:
    """The outputs of the last of several steps.

    `initial_outputs` are the `last_step_outputs` before the first step.
    """

    def __init__(
        self, strategy: Any, initial_outputs: dict[str, Any] | None = None
    ) -> None:
        self._strategy = strategy
        self.last_step_outputs: dict[str, Any] = dict(initial_outputs or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    @property
    def run_op(self) -> None:
        """`None`: the steps have run already, there is no graph operation."""

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output, in place of the one from an earlier step.

        In a replica function, all replicas have to make this call.

        Args:
            name: String, the key in `last_step_outputs`.
            output: Tensor, or nest of per-replica values.
            reduce_op: `ReduceOp`, or its name, to combine the output over
                replicas. `None` keeps the output as it is.
        """

        def set_it(strategy: Any, value: Any) -> None:
            if reduce_op is not None:
                value = strategy.reduce(reduce_op, value, axis=None)
            self.last_step_outputs[name] = value

        self._together(set_it, output)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Sets an output that is no tensor; from replicas, a tuple of all.

        Args:
            name: String, the key in `non_tensor_outputs`.
            output: Any object.
        """
        in_replica = context.current_replica_context() is not None

        def set_it(strategy: Any, value: Any) -> None:
            if in_replica:
                value = strategy.experimental_local_results(value)
            self.non_tensor_outputs[name] = value

        self._together(set_it, output)

    def _together(self, set_it: Any, output: Any) -> None:
        replica = context.current_replica_context()
        if replica is None:
            set_it(self._strategy, output)
        else:
            replica.merge_call(set_it, args=(output,))
