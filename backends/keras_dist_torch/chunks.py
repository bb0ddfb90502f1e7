"""Updates of variables in chunks, so that few bytes are in use at a time.

Keras' optimizers compute with lists of tensors, and their results are as large
as all the variables together: three times for Adam. A chunk's are not.
"""

from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_dist.plugins import as_hook
from keras_dist.plugins import is_of_keras
from keras_dist.plugins import packs

# Bytes of variables that are updated together, at most, or of a larger one.
CHUNK = 1 << 26
# Of an optimizer: the variables that it updated last, and their chunks.
_CHUNKS = "_keras_dist_chunks"


@as_hook
def hook_update(
    original: Any,
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable],
    learning_rate: Any,
) -> None:
    """Stands for the update of Keras' optimizers for PyTorch."""
    chunks = (
        () if torch.compiler.is_compiling() else _of(self, trainable_variables)
    )
    if len(chunks) < 2:
        original(self, grads, trainable_variables, learning_rate)
        return
    for chunk in chunks:
        original(
            self,
            [grads[index] for index in chunk],
            [trainable_variables[index] for index in chunk],
            learning_rate,
        )


def _of(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable]
) -> Sequence[Sequence[int]]:
    """Returns the indices of the variables of each chunk."""
    key = tuple(map(id, variables))
    known: tuple[Any, Any] = vars(optimizer).get(_CHUNKS, ((), ()))
    if known[0] != key:
        known = key, chunks(variables) if may_cut(optimizer) else ()
        vars(optimizer)[_CHUNKS] = known
    indices: Sequence[Sequence[int]] = known[1]
    return indices


def is_elementwise(optimizer: keras.Optimizer) -> bool:
    """Returns whether each element's update is its own, as Keras writes it.

    The optimizer is one that updates many variables by one call.
    """
    return is_of_keras(optimizer._parallel_update_step)


def may_cut(optimizer: keras.Optimizer) -> bool:
    """Returns whether variables may be updated by several calls."""
    # Nadam's also changes a number that all variables share.
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    return is_elementwise(optimizer) and not is_nadam


def chunks(variables: Sequence[keras.Variable]) -> Sequence[Sequence[int]]:
    """Divides variables of strategies; others are as plain Keras has them."""
    if any(
        "distribute_strategy" not in vars(variable) for variable in variables
    ):
        return ()
    sizes = [_num_bytes_here(variable.value) for variable in variables]
    return packs([None] * len(sizes), sizes, CHUNK)


def _num_bytes_here(value: Any) -> int:
    # A `DTensor`, which takes long to import, has a part on this worker.
    local = value.to_local() if hasattr(value, "to_local") else value
    return int(local.nbytes)
