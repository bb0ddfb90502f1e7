"""A value that a replica assigned to a variable, in place of the variable."""

from typing import Any

import tensorflow as tf

from keras_dist_tensorflow import internals


class HeldVariable(internals.BaseResourceVariable):
    """Reads as a tensor, and is watched by tapes as a variable is.

    So `tape.gradient(loss, variables)` finds what a replica computed from a
    variable that it had assigned, whose only copy is to stay as it was until
    all replicas agree.

    Args:
        value: Tensor.
        name: String.
    """

    def __init__(self, value: Any, name: str) -> None:
        # Gradients end here, as they do at a variable.
        value = tf.stop_gradient(value)
        super().__init__(
            trainable=True,
            shape=value.shape,
            dtype=value.dtype,
            handle=value,
            handle_name=name,
            unique_id=name,
            synchronization=tf.VariableSynchronization.AUTO,
            aggregation=tf.VariableAggregation.NONE,
        )

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        internals.watch(self)
        return self.handle

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Some of its rows."""
        return tf.gather(self._read_variable_op(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """Some of its entries."""
        return tf.gather_nd(self._read_variable_op(), indices, name=name)
