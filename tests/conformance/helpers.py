"""What the tests need beside `keras_dist` and `keras.ops`."""

import contextlib

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope

import keras_dist

BACKEND = keras.backend.backend()


def is_distributed(value):
    """Whether a value has one component a replica, ours or the original's."""
    kinds = (getattr(keras_dist, "DistributedValues", ()),)
    if BACKEND == "tensorflow":
        from conformance import native

        kinds += (native.DistributedValues,)
    return isinstance(value, kinds)


def to_numpy(value):
    """A tensor, variable, number or nest of them, as NumPy arrays."""
    return keras.tree.map_structure(
        lambda leaf: (
            np.asarray(keras.ops.convert_to_numpy(leaf))
            if keras.ops.is_tensor(leaf) or isinstance(leaf, keras.Variable)
            else np.asarray(leaf)
        ),
        value,
    )


def local(value):
    """A value's components as NumPy arrays; a plain value is the only one."""
    parts = value.values if is_distributed(value) else (value,)
    return [to_numpy(part) for part in parts]


def numbers(value):
    """A value's components as lists and numbers of Python."""
    return [
        keras.tree.map_structure(lambda leaf: leaf.tolist(), part)
        for part in local(value)
    ]


def replica_id(api):
    """This replica's number as a Python integer.

    Ours is one; the original's is a tensor.
    """
    return int(api.get_replica_context().replica_id_in_sync_group)


def gradients(fn, inputs):
    """Gradients of a scalar, by the framework itself.

    Args:
        fn: Function of no arguments if `inputs` are variables, of as many as
            there are `inputs` if these are tensors.
        inputs: List of tensors, or list of `keras.Variable`s.

    Returns:
        Tuple `(value, gradients)`, gradients in the order of `inputs`.
    """
    inputs = list(inputs)
    of_variables = all(isinstance(x, keras.Variable) for x in inputs)
    compute = {
        "jax": _jax_gradients,
        "tensorflow": _tensorflow_gradients,
        "torch": _torch_gradients,
    }[BACKEND]
    return compute(fn, inputs, of_variables)


def _jax_gradients(fn, inputs, of_variables):
    import jax

    def compute(values):
        if not of_variables:
            return fn(*values)
        with _values_of(inputs, values):
            return fn()

    values = [x.value for x in inputs] if of_variables else inputs
    value, grads = jax.value_and_grad(compute)(values)
    return value, list(grads)


@contextlib.contextmanager
def _values_of(variables, values):
    mapping = list(zip(variables, values, strict=True))
    outer = get_stateless_scope() if in_stateless_scope() else None
    scope = keras.StatelessScope(state_mapping=mapping)
    if outer is not None:
        scope.state_mapping = {**outer.state_mapping, **scope.state_mapping}
    with scope:
        yield


def _tensorflow_gradients(fn, inputs, of_variables):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        if not of_variables:
            inputs = [tf.convert_to_tensor(x) for x in inputs]
            tape.watch(inputs)
        value = fn() if of_variables else fn(*inputs)
    sources = [x.value for x in inputs] if of_variables else inputs
    return value, tape.gradient(value, sources)


def _torch_gradients(fn, inputs, of_variables):
    import torch

    if of_variables:
        value = fn()
        sources = [x.value for x in inputs]
    else:
        sources = [x.detach().clone().requires_grad_() for x in inputs]
        value = fn(*sources)
    return value.detach(), list(torch.autograd.grad(value, sources))
