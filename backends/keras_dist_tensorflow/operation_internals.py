"""The door to private names about single operations, and who runs them.

| name | why |
|---|---|
| `tensorflow.python.distribute.values.DistributedVariable` | a variable with |
| | a copy a device is a number where a plain one is |
| `tensorflow.python.eager.context.context().op_callbacks` | threads of a |
| | native strategy share them |
| `tensorflow.python.framework.op_callbacks` | what operations replicas run |
| | outside of graphs: where sparse gradients' indices come from |
| `tensorflow.python.framework.ops.EagerTensor` | whether it is in a graph |
| `EagerTensor._id`, `tensorflow.python.pywrap_tfe.TFE_Py_UID` | whether it |
| | was made before a step |
| `FuncGraph.function_captures.by_val_internal` | or before a step's graph: |
| | small ones are in it as constants |
| `tf.Graph._get_function` | what is in a `tf.function` in a graph |

`tests/backends/tensorflow/test_origins.py` fails readably when one moves.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks
from tensorflow.python.framework.ops import EagerTensor


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has its value already, in no graph."""
    return isinstance(tensor, EagerTensor)


def tensors_so_far() -> int:
    """A number that tensors which are made later have a larger one than."""
    return int(pywrap_tfe.TFE_Py_UID())


def is_made_outside(tensor: Any, start: int) -> bool:
    """Whether a tensor was made before a step, or outside of its graph.

    Args:
        tensor: Tensor.
        start: Integer, `tensors_so_far` when the step began.
    """
    if is_eager(tensor):
        return bool(tensor._id < start)
    captures = getattr(tensor.graph, "function_captures", None)
    if captures is None:
        return False
    return any(own is tensor for own in captures.by_val_internal.values())


def body_of(call: tf.Operation) -> Any:
    """The graph of the function that an operation calls; `None` if unknown."""
    name = call.get_attr("f").name
    try:
        return call.graph._get_function(name).graph
    except AttributeError:  # made by no `tf.function`
        return None


@contextlib.contextmanager
def watching_operations(callback: Callable[..., None]) -> Iterator[None]:
    """Tells `callback` of each operation that this thread runs."""
    if callback in context.context().op_callbacks:
        yield  # a native replica's thread shares the list with the others
        return
    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


@functools.cache
def install_conversions() -> None:
    """Makes `int(v)` and the like what they are on one device.

    TensorFlow has left them out where a variable has a copy a device. Truth
    stays that of any object: TensorFlow itself asks so whether there is one.
    """
    for kind in (complex, float, int):
        setattr(DistributedVariable, f"__{kind.__name__}__", _converting(kind))


def _converting(kind: type) -> Callable[[Any], Any]:
    def convert(self: Any) -> Any:
        return kind(self.read_value())

    return convert
