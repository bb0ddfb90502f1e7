"""Draws for rows of a batch that come in another order, or several times."""

from typing import Any

import numpy as np
from keras import ops

from keras_dist.core.rows import RowShard
from keras_dist.plugin.draws import Draw
from keras_dist.plugin.draws import Drawer
from keras_dist.plugin.draws import DrawnRows
from keras_dist.plugin.draws import rows_by_size


def drawer_of(index: Any) -> Drawer:
    """Returns a function that gives each row what it gets in its own batch.

    Args:
        index: Array of integers: of each row, the one of its own batch.
    """
    rows, total = len(index), int(np.max(index)) + 1
    # Where the own batch's rows are.
    inverse = [index.tolist().index(row) for row in range(total)]

    def draw(made: Draw) -> Any:
        sizes = made.shape
        is_known = all(isinstance(size, int) for size in sizes)
        num_rows = rows if is_known else ops.convert_to_tensor(rows)
        drawn = rows_by_size(sizes, RowShard(num_rows, num_rows))
        if drawn is None or made.name == "shuffle":
            return made.again()
        times = drawn.size // num_rows
        part = DrawnRows(drawn.axis, 0, drawn.size, times * total)

        def gather(value: object, axis: int) -> Any:
            return ops.take(value, _spread(inverse, times), axis)

        whole = made.for_all(part, made.gathered(part, gather))
        return made.of(ops.take(whole, _spread(index, times), part.axis))

    return draw


def _spread(index: object, times: object) -> Any:
    """Returns the places of rows that have several values each."""
    column = ops.expand_dims(ops.convert_to_tensor(index, "int32"), 1)
    return ops.reshape(column * times + ops.arange(times, dtype="int32"), [-1])
