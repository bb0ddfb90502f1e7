"""Values that a replica has assigned and not yet written to the variable."""

from typing import Any

import tensorflow as tf

from keras_dist_tensorflow import runtime_internals


class HeldVariable(runtime_internals.BaseResourceVariable):
    """A tensor that tapes watch as they watch a variable.

    It replaces a variable that a replica has assigned, because the only copy
    must not change before all replicas agree on its value. Being watched, it
    lets `tape.gradient(loss, variables)` find the replica's computation.
    """

    def __init__(self, value: Any, name: str) -> None:
        # Gradients stop at this value, as they do at a variable.
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
        runtime_internals.watch(self)
        return self.handle

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Returns the rows at `indices`."""
        return tf.gather(self._read_variable_op(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """Returns the elements or slices at `indices`."""
        return tf.gather_nd(self._read_variable_op(), indices, name=name)
