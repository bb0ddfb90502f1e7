"""Explains errors of batches that are one whole, such as one graph."""

import re
from collections.abc import Callable
from collections.abc import Sequence

from keras_dist.errors import KerasDistError
from keras_dist.errors import UnsupportedModelError

_OF_SHAPES = re.compile("shape|dimension|size", re.IGNORECASE)


def explained(
    error: BaseException,
    shapes: Sequence[tuple[int | None, ...]],
    rows: Callable[[], int],
) -> BaseException:
    """Returns an error that names an array that relates all rows.

    Such an array is the likely cause of an error of shapes. Other errors are
    returned as they are.

    Args:
        error: Exception of a step.
        shapes: Sequence of the shapes of the leaves of its batch.
        rows: Callable that returns the number of rows, if no shape has it.
    """
    known = [shape for shape in shapes if shape]
    is_own = isinstance(error, KerasDistError)
    if is_own or len(known) < 2 or not _OF_SHAPES.search(str(error)):
        return error
    count = known[0][0] or rows()
    square = next((s for s in known if s[1:2] == (count,)), None)
    if square is None:
        return error
    shape = (count, *square[1:])
    return UnsupportedModelError(
        "A step failed on a batch in which an array is as wide as the batch "
        f"has rows.\nReceived: shape {shape}. If it relates all rows with each "
        "other, as the adjacency matrix of a graph does, the batch is one "
        "whole, and its rows can't be divided among replicas. Expected: rows "
        "that stand alone. Make each graph one row, with an axis for graphs "
        "first, as in (graphs, nodes, features) and (graphs, nodes, nodes). "
        "Or use one device, or the JAX backend. The step's own error was "
        f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    )
