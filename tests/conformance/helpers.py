"""What the tests need beside `keras_dist` and `keras.ops`."""

import contextlib
import os

import keras
import numpy as np
import pytest
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope

import keras_dist

BACKEND = keras.backend.backend()

# `run` is a loop over replicas in Python, that `jax.jit` would trace on one
# device. `keras_dist.function` compiles them as a whole.
runs_compiled = pytest.mark.skipif(
    BACKEND == "jax",
    reason="`jax.jit` can't be around `run`; `keras_dist.function` can, and "
    "tests/functions has it there",
)

FOURTH = bool(os.environ.get("KERAS_DIST_FOURTH"))
compiles = pytest.mark.skipif(
    FOURTH, reason="the backend of `fourth.py` compiles no functions"
)

splits = pytest.mark.skipif(
    FOURTH, reason="the backend of `fourth.py` has optimizers in whole copies"
)

# PyTorch's tensors do not tell one CPU from another.
ELSEWHERE = "meta" if FOURTH else "cpu:1"


def function(fn):
    """`keras_dist.function`, of a backend that compiles functions."""
    return fn if FOURTH else keras_dist.function(fn)


def is_distributed(value):
    """Whether a value has one component a replica, ours or the original's."""
    kinds = (keras_dist.DistributedValues,)
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


def tensor(value, dtype="float32"):
    """A tensor of the backend."""
    return keras.ops.convert_to_tensor(value, dtype=dtype)


def per_replica(strategy, value_fn):
    """A value with `value_fn(replica id)` on each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: value_fn(context.replica_id_in_sync_group)
    )


def raw(api, variable):
    """The variable as `api` knows it.

    The original knows Keras' variables by what is under them only.
    """
    return variable if api is keras_dist else variable.value


class Batches:
    """An iterable of batches, that can be iterated again."""

    def __init__(self, *batches):
        self._batches = [np.asarray(batch, "float32") for batch in batches]

    def __iter__(self):
        return iter(self._batches)


def distribute(api, strategy, *batches):
    """A distributed dataset of these batches, in this order."""
    if api is keras_dist:
        dataset = Batches(*batches)
    else:
        dataset = api.dataset_of(*batches)
    return strategy.experimental_distribute_dataset(dataset)


def compiled(fn):
    """The function, compiled where the framework has a compiler for it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(fn)
    if BACKEND == "jax":
        import jax

        return jax.jit(fn)
    return fn


def sparse(rows):
    """A sparse tensor of the backend with the given dense rows."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(
            tf.constant(rows), tf.range(len(rows)), tf.constant(np.shape(rows))
        )
    if BACKEND == "jax":
        from jax.experimental import sparse as jax_sparse

        return jax_sparse.BCOO.fromdense(tensor(rows))
    return tensor(rows).to_sparse()


def dense(value):
    """A sparse tensor of the backend as a dense one."""
    if BACKEND == "torch":
        return value.to_dense()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(value)
    return keras.ops.convert_to_tensor(value, sparse=False)


def through_framework_tree(value):
    """Flattens a value with the framework's own trees, and builds it again.

    Returns:
        Tuple of the list of leaves, and the value built of them.
    """
    if BACKEND == "tensorflow":
        import tensorflow as tf

        leaves = tf.nest.flatten(value, expand_composites=True)
        return leaves, tf.nest.pack_sequence_as(
            value, leaves, expand_composites=True
        )
    if BACKEND == "jax":
        import jax

        leaves, structure = jax.tree.flatten(value)
        return leaves, jax.tree.unflatten(structure, leaves)
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(value)
    return leaves, _pytree.tree_unflatten(leaves, structure)


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
