"""Explanation: the rows of a batch that go to each replica, as a table."""

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from rich.text import Text

from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.nests import select
from keras_dist.core.rows import check_batched
from keras_dist.core.rows import check_rows
from keras_dist.core.rows import ranges
from keras_dist.core.rows import readable
from keras_dist.core.rows import shape_of
from keras_dist.core.rows import text_of_unequal
from keras_dist.core.values import PerReplica
from keras_dist.inputs.dataset import DistributedDataset
from keras_dist.inputs.dataset import data_for_fit
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.iterator import DistributedIterator
from keras_dist.inputs.sources.choice import source_of
from keras_dist.planning.tables import NUMBER
from keras_dist.planning.tables import WORDS
from keras_dist.planning.tables import Shown
from keras_dist.planning.tables import TableReport
from keras_dist.planning.tables import table
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import kept_random_state
from keras_dist.replica.strategy_core import StrategyBase

_COLUMNS = ("Worker", "Replica", "Device", "Rows", "Number", "Shape")
_READERS = {
    "fit": "as `fit` and similar methods split it",
    "run": "as `strategy.run` receives it",
}


@dataclass(frozen=True)
class ReplicaRows:
    """One replica's rows of a batch.

    Args:
        worker: Integer, the worker's position.
        replica: Integer, the replica's position among those of all workers.
        device: String, the replica's device. It is `None` for a replica of
            another worker, since this worker does not know its devices.
        rows: `range` of rows, counted from the start of the global batch.
        shape: Nest like the batch, with the shapes of the replica's arrays. It
            is `None` if only another worker knows them.
    """

    worker: int
    replica: int
    device: str | None
    rows: range
    shape: Any

    @property
    def first(self) -> int | None:
        """The first row, or `None` if there are no rows."""
        return self.rows[0] if self.rows else None

    @property
    def last(self) -> int | None:
        """The last row, or `None` if there are no rows."""
        return self.rows[-1] if self.rows else None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The rows of a batch that each replica gets; `print` shows a table.

    Args:
        strategy: String, the strategy's description.
        reader: String, `"fit"` for a global batch that `fit` splits, or
            `"run"` for an element of a distributed dataset.
        rows: Tuple of `ReplicaRows`, in replica order.
        num_rows: Integer, number of rows of the global batch.
        notes: Tuple of strings, sentences below the table.
    """

    strategy: str
    reader: str
    rows: tuple[ReplicaRows, ...]
    num_rows: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ReplicaRows]:
        return iter(self.rows)

    def plot(self, axes: object = None) -> Any:
        """Draws which rows of the batch each replica gets.

        Each replica has a line, as long as the batch. Its own rows are
        coloured: purple or brown, by the number of its worker. A notebook shows
        the figure if it is a cell's last value. It needs `pip install
        "keras-dist[plot]"`.

        Args:
            axes: Axes of matplotlib to draw on, without a title. Default: those
                of a new figure, which pyplot does not know.

        Returns:
            The `matplotlib.figure.Figure`. `savefig` writes it to a file.

        Raises:
            ImportError: If matplotlib is not installed.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> figure = strategy.explain(np.ones((5, 3))).plot()
        >>> figure.axes[0].get_title(loc="left")
        'A batch of 5 rows, as `fit` and similar methods split it'
        """
        from keras_dist.planning import pictures

        has_workers = len({row.worker for row in self.rows}) > 1
        lines = []
        for row in self.rows:
            part = pictures.HeldPart(
                row.first or 0,
                row.num_rows,
                color=pictures.BROWN if row.worker % 2 else pictures.PURPLE,
                text=_range_text(row),
            )
            names = [f"worker {row.worker}"] if has_workers else []
            names += [f"replica {row.replica}", row.device or ""]
            lines.append(
                pictures.Line(
                    ", ".join(filter(None, names)),
                    (part,) if row.num_rows else (),
                    _count_text(row.num_rows),
                )
            )
        return pictures.draw_rows(
            lines, self.num_rows, f"A {self._title}", axes
        )

    def __rich__(self) -> TableReport:
        kinds = (NUMBER, NUMBER, WORDS, NUMBER, NUMBER, WORDS)
        columns = list(zip(_COLUMNS, kinds, strict=True))
        rows = [list(map(Text, _cells(row))) for row in self.rows]
        title = f"{self.strategy}: a {self._title}"
        return TableReport(title, [table("", *columns, rows=rows)], self.notes)

    def __repr__(self) -> str:
        counts = ", ".join(str(row.num_rows) for row in self.rows)
        return f"<Explanation of {self.num_rows} rows: {counts}>"

    @property
    def _title(self) -> str:
        return f"batch of {_count_text(self.num_rows)}, {_READERS[self.reader]}"


def _count_text(num_rows: int) -> str:
    return f"{num_rows} row{'' if num_rows == 1 else 's'}"


def _range_text(row: ReplicaRows) -> str:
    return "none" if row.first is None else f"{row.first} to {row.last}"


def _cells(row: ReplicaRows) -> Sequence[str]:
    return (
        str(row.worker),
        str(row.replica),
        row.device or "its own",
        _range_text(row),
        str(row.num_rows),
        "" if row.shape is None else str(row.shape),
    )


_TAKEN = (
    "Iterators can be read only once: `explain` took this batch from the "
    "iterator, which will not return it again."
)
_WHOLE = "The batch is not split: each replica computes all of its rows."


def explain_data(
    strategy: StrategyBase, x: Any, more: Sequence[Any], batch_size: Any
) -> Explanation:
    """Implements `strategy.explain`; `more` is `y` and `sample_weight`."""
    arrays = keras.utils.pack_x_y_sample_weight(x, *more)
    if any(isinstance(leaf, PerReplica) for leaf in leaves_of(arrays)):
        _check_alone("a batch of per-replica values", (), batch_size)
        return _of_parts(strategy, arrays)
    if not leaves_of(arrays):
        raise _no_batch(x)
    is_alone = batch_size is None and all(argument is None for argument in more)
    is_list = isinstance(x, list) and bool(x)
    if (
        is_alone
        and is_list
        and all(isinstance(element, tuple) for element in x)
    ):
        return _of_parts(strategy, _first_of(distribute_dataset(strategy, x)))
    if _are_arrays(arrays):
        batch = map_nest(readable, arrays)
        if batch_size is not None:
            batch = _first_rows(batch, batch_size)
        return _of_batch(strategy, batch)
    _check_alone(f"data of type {type(x).__name__}", more, batch_size)
    if isinstance(x, DistributedIterator):
        return _of_parts(strategy, _peeked(x))
    if isinstance(x, DistributedDataset):
        return _of_parts(strategy, _first_of(x))
    if data_for_fit(strategy, x) is not x:
        # With the policy HINT, workers read different rows, which `fit` joins
        # to global batches before it splits them.
        count = _of_parts(
            strategy, _first_of(distribute_dataset(strategy, x))
        ).num_rows
        return _of_batch(strategy, np.zeros((count, 0)))
    source = source_of(x, "explain")
    with (
        kept_random_state(get_backend())
        if source.restarts
        else contextlib.nullcontext()
    ):
        first = source.peek()
    if not first:
        raise _no_batch(x)
    notes = [] if source.restarts else [_TAKEN]
    return _of_batch(strategy, first[0], notes)


def _are_arrays(nest: object) -> bool:
    def is_array(leaf: object) -> bool:
        array = readable(leaf)
        return isinstance(array, np.ndarray) or keras.ops.is_tensor(array)

    leaves = [leaf for leaf in leaves_of(nest) if leaf is not None]
    return bool(leaves) and all(map(is_array, leaves))


def _check_alone(what: str, more: Sequence[Any], batch_size: object) -> None:
    if batch_size is not None or any(argument is not None for argument in more):
        raise ValueError(
            "`explain` takes `y`, `sample_weight` and `batch_size` with "
            f"arrays only. Received: {what}, and batch_size={batch_size}. "
            "Expected: the data alone, because its batches contain targets "
            "and weights and have a size."
        )


def _first_rows(arrays: object, batch_size: int) -> Any:
    """Returns the first batch that `fit` makes of arrays, without shuffling."""
    check_rows(arrays)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(
            "`batch_size` must be an integer of at least 1. Received: "
            f"{batch_size!r}."
        )
    return map_nest(
        lambda leaf: None if leaf is None else leaf[:batch_size], arrays
    )


def _peeked(iterator: DistributedIterator) -> Any:
    optional = iterator.peek()
    if not optional.has_value():
        raise _no_batch(iterator)
    return optional.get_value()


def _first_of(dataset: DistributedDataset) -> Any:
    if not dataset.restarts:
        # Data that is read once has one iterator, which keeps the element.
        return _peeked(iter(dataset))
    with kept_random_state(get_backend()):
        return _peeked(iter(dataset))


def _no_batch(data: object) -> ValueError:
    return ValueError(
        "There is no batch to explain. Received: data of type "
        f"{type(data).__name__} that has no batch left. Expected: at least "
        "one batch."
    )


def _of_batch(
    strategy: StrategyBase, batch: object, notes: Sequence[str] = ()
) -> Explanation:
    check_batched(batch)
    shares = strategy.executor.rows_in_fit(batch)
    lengths = [
        int(shape_of(leaf)[0] or 0)
        for leaf in leaves_of(batch)
        if shape_of(leaf)
    ]
    is_equal, total = len(set(lengths)) == 1, max(lengths)

    def shape_in(share: range) -> Callable[[Any], Any]:
        def shape(leaf: object) -> Any:
            full_shape = shape_of(leaf)
            if not full_shape:
                return None if leaf is None else ()
            is_cut = is_equal or not share
            return (len(share) if is_cut else full_shape[0], *full_shape[1:])

        return shape

    shapes = [map_nest(shape_in(share), batch) for share in shares]
    notes = list(notes)
    if not is_equal:
        shares = [range(total if share else 0) for share in shares]
        notes.append(text_of_unequal(lengths, on_each=bool(shares[-1])))
    elif len(shares) > 1 and shares[-1] == range(total) != range(0):
        notes.append(_WHOLE)
    return _explanation(strategy, "fit", shares, shapes, total, notes)


def _of_parts(strategy: StrategyBase, element: object) -> Explanation:
    """Explains which rows of a distributed element `strategy.run` passes."""
    plan, workers = strategy.plan, strategy.executor.workers
    parts = [select(index, element) for index in range(plan.num_local_replicas)]
    counts = [_num_rows(part) for part in parts]
    if workers is not None:
        counts = workers.concatenate_numbers(counts)
    local_shapes: list[Any] = [map_nest(_shape, part) for part in parts]
    before, total = plan.first_replica, sum(counts)
    shapes = [None] * before + local_shapes
    shapes += [None] * (len(counts) - len(shapes))
    shares = ranges([0, *itertools.accumulate(counts)])
    notes = []
    if total:
        in_fit = strategy.executor.rows_in_fit(np.zeros((total, 0)))
        if in_fit != shares:
            sizes = ", ".join(str(len(share)) for share in in_fit)
            notes.append(f"`fit` gives the replicas {sizes} of these rows.")
    return _explanation(strategy, "run", shares, shapes, total, notes)


def _shape(leaf: object) -> Any:
    return None if leaf is None else shape_of(leaf)


def _num_rows(part: object) -> int:
    shapes = [shape_of(leaf) for leaf in leaves_of(part)]
    return int(next((shape[0] for shape in shapes if shape), 0) or 0)


def _explanation(
    strategy: StrategyBase,
    reader: str,
    shares: Sequence[range],
    shapes: Sequence[Any],
    total: int,
    notes: Sequence[str],
) -> Explanation:
    plan = strategy.plan
    local = plan.num_local_replicas
    rows = []
    for index, (share, shape) in enumerate(zip(shares, shapes, strict=True)):
        local_index = index - plan.first_replica
        is_here = 0 <= local_index < local
        device = str(plan.devices[local_index]) if is_here else None
        rows.append(ReplicaRows(index // local, index, device, share, shape))
    title = repr(strategy).strip("<>")
    return Explanation(title, reader, tuple(rows), total, tuple(notes))
