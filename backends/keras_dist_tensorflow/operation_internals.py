"""The door to private names about single operations and tensors.

| name | why |
|---|---|
| `tensorflow.python.distribute.values.DistributedVariable` | `int(v)` and the |
| | like for mirrored variables, as for plain ones |
| `tensorflow.python.eager.context.context().op_callbacks` | threads of a |
| | native strategy share the list |
| `tensorflow.python.framework.op_callbacks` | records the operations that |
| | replicas run eagerly: origins of sparse gradients' indices |
| `tensorflow.python.framework.ops.EagerTensor` | tells eager tensors from |
| | those of graphs |
| `EagerTensor._id`, `tensorflow.python.pywrap_tfe.TFE_Py_UID` | tells if a |
| | tensor was made before a step |
| `FuncGraph.function_captures.by_val_internal` | the same in graphs, which |
| | hold small captured tensors as constants |
| `tf.Graph._get_function` | the body of a `tf.function` called in a graph |

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
    """Returns whether a tensor is eager: it has a value and is in no graph."""
    return isinstance(tensor, EagerTensor)


def tensors_so_far() -> int:
    """Returns a number smaller than the `_id` of any tensor made later."""
    return int(pywrap_tfe.TFE_Py_UID())


def is_made_outside(tensor: Any, start: int) -> bool:
    """Returns whether a tensor was made before a step or outside its graph.

    `start` is `tensors_so_far` when the step began.
    """
    if is_eager(tensor):
        return bool(tensor._id < start)
    captures = getattr(tensor.graph, "function_captures", None)
    if captures is None:
        return False
    return any(own is tensor for own in captures.by_val_internal.values())


def body_of(call: tf.Operation) -> Any:
    """Returns the graph of the called function, `None` if unknown."""
    name = call.get_attr("f").name
    try:
        return call.graph._get_function(name).graph
    except AttributeError:  # not the function of a `tf.function`
        return None


@contextlib.contextmanager
def watching_operations(callback: Callable[..., None]) -> Iterator[None]:
    """Calls `callback` for each operation that this thread runs."""
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
    """Adds `int(v)`, `float(v)` and `complex(v)` to mirrored variables.

    TensorFlow has them for plain variables only. `bool(v)` is not added:
    TensorFlow itself uses it to ask whether there is a variable.
    """
    for kind in (complex, float, int):
        setattr(DistributedVariable, f"__{kind.__name__}__", _converting(kind))


def _converting(kind: type) -> Callable[[Any], Any]:
    def convert(self: Any) -> Any:
        return kind(self.read_value())

    return convert
