"""A random draw of Keras in a replica: rows of the draw for a global batch."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_dist.core.context import replaced
from keras_dist.core.rows import RowShard
from keras_dist.internals import keras_random


class _Drawing(threading.local):
    def __init__(self) -> None:
        # What makes this thread's draws, outside of steps.
        self.by: Drawer | None = None
        # Whether this thread draws for the global batch, so that seeds are
        # those of one device.
        self.has_common_seeds = False


_drawing = _Drawing()


def drawn_by(
    drawer: "Drawer | None",
) -> contextlib.AbstractContextManager[None]:
    """Has a function make this thread's draws inside, outside of steps."""
    return replaced(_drawing, by=drawer)


def drawer() -> "Drawer | None":
    """Returns the function of `drawn_by`."""
    return _drawing.by


def with_common_seeds() -> contextlib.AbstractContextManager[None]:
    """Gives draws inside the seeds that all replicas have in common."""
    return replaced(_drawing, has_common_seeds=True)


def has_common_seeds() -> bool:
    """Returns whether this thread is in `with_common_seeds`."""
    return _drawing.has_common_seeds


class DrawnRows(NamedTuple):
    """The place of a replica's part in the draw that one device makes."""

    axis: int
    start: Any  # an integer, or in a graph a scalar tensor, as the next two
    size: Any  # of the part
    total: Any  # size of the whole

    def cut(self, whole: Any) -> Any:
        """Returns the part of what was drawn for all rows."""
        before = [slice(None)] * self.axis
        return whole[(*before, slice(self.start, self.start + self.size))]


def rows_at(axis: int, shape: Sequence[Any], share: RowShard) -> DrawnRows:
    """Returns a part with one or several values for each row along an axis."""
    rows, start = share.rows, share.start
    if not isinstance(rows, int):
        times = shape[axis] // ops.maximum(rows, 1)
    else:
        times = shape[axis] // max(rows, 1)
        start = start if rows else 0
    return DrawnRows(axis, times * start, shape[axis], times * share.total)


def rows_by_size(
    shape: Sequence[Any],
    share: RowShard,
    may_be_rows: Callable[[Any], bool] = lambda size: True,
) -> DrawnRows | None:
    """Finds the axis of rows of what is drawn; `None` if it has no rows.

    In a graph for any batch size, it is the first axis whose size is a tensor,
    and which `may_be_rows`. Else sizes decide: the first axis if it is a
    multiple of the rows, or one that is equal to them. In doubt it has rows:
    then replicas draw different numbers.
    """
    if not isinstance(share.rows, int):
        for axis, size in enumerate(shape):
            if not isinstance(size, int) and may_be_rows(size):
                return _checked(rows_at(axis, shape, share), share)
        return None
    rows = max(share.rows, 1)
    sizes = [size if isinstance(size, int) else 0 for size in shape]
    if sizes and sizes[0] and sizes[0] % rows == 0:
        return rows_at(0, shape, share)
    if rows in sizes:
        return rows_at(sizes.index(rows), shape, share)
    return None


def _checked(drawn: DrawnRows, share: RowShard) -> DrawnRows:
    """Returns the whole for a size that is no multiple of the rows."""
    rows = ops.maximum(share.rows, 1)
    is_multiple = ops.equal(drawn.size // rows * rows, drawn.size)
    return drawn._replace(
        start=ops.where(is_multiple, drawn.start, 0),
        total=ops.where(is_multiple, drawn.total, drawn.size),
    )


def _ones(inputs: Any, sizes: list[Any]) -> Any:
    return ops.ones(sizes, inputs.dtype)


# The arguments of Keras' functions that may have a value for each row.
_PARAMETERS = ("logits", "alpha", "beta", "counts", "probabilities")


class Draw:
    """A call of one of the functions of `keras.random`.

    Args:
        name: String, the function's name.
        function: Callable, Keras' own.
        arguments: Dict of all its arguments.
        where: String, the place of the call.
        warn: Callable that is called if all rows are needed for each.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        where: str,
        warn: Callable[[], None],
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.where = where
        self.warn = warn
        self._function = function

    @property
    def is_made(self) -> bool:
        """True if there is something to draw."""
        return self.name != "dropout" or self.arguments["rate"] not in (0, 1)

    def shuffles(self, axis: int) -> bool:
        """Returns whether what lies along an axis gets another order."""
        return self.name == "shuffle" and self.arguments["axis"] == axis

    @property
    def shape(self) -> list[Any]:
        """The sizes of what is drawn: for `dropout` those of the mask."""
        given = self.arguments
        if self.name == "categorical":
            return [ops.shape(given["logits"])[0], given["num_samples"]]
        if self.name == "shuffle":
            return list(ops.shape(given["x"]))
        if self.name != "dropout":
            return _sizes(given["shape"])
        sizes = list(ops.shape(given["inputs"]))
        if given["noise_shape"] is None:
            return sizes
        pairs = zip(sizes, _sizes(given["noise_shape"]), strict=True)
        return [size if noise is None else noise for size, noise in pairs]

    def again(self, **changed: Any) -> Any:
        """Calls Keras' function, with some arguments changed."""
        return self._function(**{**self.arguments, **changed})

    @property
    def numbers(self) -> list[tuple[str, Any]]:
        """The arguments that have to be the same on each replica."""
        return [
            (key, value)
            for key, value in self.arguments.items()
            if value is None or isinstance(value, (bool, int, float, str))
        ]

    def apart(self) -> Any:
        """Draws other numbers on each replica."""
        with replaced(_drawing, has_common_seeds=False):
            return self.again()

    def skip(self) -> None:
        """Moves the seed on, as if this was drawn."""
        keras_random.draw_seed(self.arguments["seed"])

    def gathered(
        self, rows: DrawnRows, gather: Callable[[Any, int], Any]
    ) -> dict[str, Any]:
        """Returns the parameters that have a value for each row, of all rows.

        Args:
            rows: `DrawnRows`, this replica's.
            gather: Callable from such a parameter, and the axis of its rows.
        """
        parameters = {}
        for name in _PARAMETERS:
            value = self.arguments.get(name)
            dims = len(getattr(value, "shape", ()))
            if value is None or not dims:
                continue
            axis = rows.axis - len(self.shape) + dims
            if axis >= 0 and _may_equal(value.shape[axis], rows.size):
                parameters[name] = gather(value, axis)
        return parameters

    def for_all(
        self,
        rows: DrawnRows | None,
        parameters: Mapping[str, Any],
        ones: Callable[[Any, list[Any]], Any] = _ones,
    ) -> Any:
        """Draws for all rows: a mask for `dropout`, an order for `shuffle`.

        Args:
            rows: `DrawnRows`, this replica's; `None` if what is drawn has none.
            parameters: What `gathered` returned.
            ones: Callable from the inputs of `dropout` and the sizes of its
                mask to ones with such sizes.
        """
        given, sizes = self.arguments, self.shape
        if rows is not None:
            sizes[rows.axis] = rows.total
        if self.name == "dropout":
            noise = None if given["noise_shape"] is None else sizes
            inputs = ones(given["inputs"], sizes)
            return self.again(inputs=inputs, noise_shape=noise)
        if self.name == "shuffle":
            axis = given["axis"]
            along = [sizes[axis], *[1] * (len(sizes) - axis - 1)]
            index = ops.reshape(ops.arange(sizes[axis]), along)
            return self.again(x=ops.broadcast_to(index, sizes))
        changed = dict(parameters)
        if "shape" in given:
            changed["shape"] = tuple(sizes)
        return self.again(**changed, **self._standard)

    @property
    def _standard(self) -> dict[str, float]:
        """The parameters that own rows are scaled by after the draw."""
        given = self.arguments
        if self.name == "uniform":
            return {"minval": 0.0, "maxval": 1.0}
        if any(getattr(given.get(x), "shape", ()) for x in ("mean", "stddev")):
            return {"mean": 0.0, "stddev": 1.0}
        return {}

    def of(self, part: Any) -> Any:
        """Returns the result, given own rows of what `for_all` drew."""
        given = self.arguments
        if self.name == "uniform":
            low, high = given["minval"], given["maxval"]
            return (high - low) * part + low
        if "mean" in self._standard:
            mean, stddev = (
                ops.cast(given[name], part.dtype) for name in ("mean", "stddev")
            )
            return part * stddev + mean
        if self.name == "shuffle":
            return ops.take_along_axis(given["x"], part, given["axis"])
        if self.name == "dropout":
            kept = given["inputs"] / (1.0 - given["rate"])
            return ops.where(part != 0, kept, ops.zeros_like(kept))
        return part


def _may_equal(size: int | None, rows: object) -> bool:
    """Returns whether sizes are equal, or known when a graph runs."""
    return size == rows if isinstance(rows, int) else size is None


def _sizes(shape: Any) -> list[Any]:
    if isinstance(shape, int):
        return [shape]
    if isinstance(shape, (list, tuple)):
        return list(shape)
    return [shape[i] for i in range(shape.shape[0])]


Drawer = Callable[[Draw], Any]


def draw_by_size(
    draw: Draw, share: RowShard, gather: Callable[[Any, int], Any]
) -> Any:
    """Draws for all rows, and returns a share's. Sizes tell what has rows.

    Args:
        draw: `Draw`.
        share: `RowShard`.
        gather: As for `Draw.gathered`.
    """
    rows = rows_by_size(draw.shape, share)
    if rows is None:
        return draw.again()
    if draw.shuffles(rows.axis):
        draw.warn()
        return draw.apart()
    parameters = draw.gathered(rows, gather)
    return draw.of(rows.cut(draw.for_all(rows, parameters)))
