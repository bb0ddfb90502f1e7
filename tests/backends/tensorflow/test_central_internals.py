"""The private names that one copy of each variable needs are still there.

`keras_dist_tensorflow/runtime_internals.py` says what each is for.
"""

import ast
import inspect

import keras
import tensorflow as tf
from tensorflow.python.eager import tape
from tensorflow.python.ops import summary_ops_v2
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from keras_dist_tensorflow.central import AtOwners


def test_a_thread_can_take_over_what_is_open_in_another():
    def creator(next_creator, **kwargs):
        return next_creator(**kwargs)

    graph = tf.compat.v1.get_default_graph()
    with tf.variable_creator_scope(creator):
        creators = [each for _, each in graph._variable_creator_stack]
    assert creator in creators
    assert {"writer", "step"} <= set(vars(summary_ops_v2._summary_state))


def test_reads_of_variables_go_through_what_a_held_value_overrides():
    names = ("_read_variable_op", "sparse_read", "gather_nd")
    assert not [n for n in names if not hasattr(BaseResourceVariable, n)]
    assert "_read_variable_op" in inspect.getsource(BaseResourceVariable.value)
    assert callable(tape.variable_accessed)


def test_optimizers_ask_their_strategy_for_what_we_have():
    asked = {
        node.attr
        for cls in (keras.optimizers.Optimizer, keras.callbacks.SwapEMAWeights)
        for base in cls.__mro__
        if base.__module__.startswith("keras.")
        for node in ast.walk(ast.parse(inspect.getsource(base)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "extended"
    }
    assert {"update", "colocate_vars_with"} <= asked
    assert asked - {"call_for_each_replica"} <= set(dir(AtOwners)), asked
