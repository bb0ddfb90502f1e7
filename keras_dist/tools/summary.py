"""`keras_dist.summary`: the memory of devices, and the traffic of a step."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from rich.text import Text

from keras_dist.planning import tables
from keras_dist.planning.estimates import Transfer
from keras_dist.planning.estimates import transfers
from keras_dist.plugin.front_end import bound
from keras_dist.tools import counting
from keras_dist.tools.counting import GROUPS
from keras_dist.tools.counting import VariableRow

_PLAIN = "The model has no strategy: a step sends nothing to other devices."
_ONE_REPLICA = "There is one replica: a step sends nothing to other devices."
_NO_SLOTS = (
    "The optimizer makes its slots in the first step: they are not counted yet."
)
_ESTIMATED = (
    "The amount that a step sends is a minimum: a backend may send more. "
    "Data, losses, metrics and batch statistics are not counted."
)
_LOGICAL = (
    "What the logical devices of a replica send each other is not counted: it "
    "depends on the rows and on the compiler. `keras-dist plan --target` "
    "compiles a step and counts it."
)


@dataclass(frozen=True)
class DeviceTotal:
    """The bytes that one device keeps between steps.

    Args:
        device: String, the device's name.
        of_groups: Tuple of integers, bytes of each of `GROUPS`.
    """

    device: str
    of_groups: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all groups."""
        return sum(self.of_groups)


@dataclass(frozen=True, repr=False)
class Summary(tables.Shown):
    """The result of `keras_dist.summary`; `print` shows it.

    Args:
        model: String, the model's name.
        strategy: String, the strategy's description; empty without one.
        rows: Tuple of `VariableRow`s, in the order of `GROUPS`.
        device_names: Tuple of strings, the devices of this worker.
        transfers: Tuple of `Transfer`s, the least that a step of `fit` sends.
        notes: Tuple of strings, sentences below the tables.
        max_rows: Integer, number of variables to show, or `None` for all.
    """

    model: str
    strategy: str
    rows: tuple[VariableRow, ...]
    device_names: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    notes: tuple[str, ...]
    max_rows: int | None = None

    @property
    def devices(self) -> tuple[DeviceTotal, ...]:
        """The `DeviceTotal` of each device of this worker."""
        totals: Counter[tuple[str, str]] = Counter()
        for row in self.rows:
            for device, num_bytes in row.kept:
                totals[device, row.group] += num_bytes
        return tuple(
            DeviceTotal(name, tuple(totals[name, group] for group in GROUPS))
            for name in self.device_names
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that all devices of all workers send in a step."""
        return sum(transfer.total for transfer in self.transfers)

    def shown_rows(
        self,
    ) -> Iterable[tuple[str, tuple[VariableRow, ...], tuple[VariableRow, ...]]]:
        """Yields each group's name, the rows to show, and those left out.

        If there are more than `max_rows` rows, each group gets an equal share,
        and larger groups get the rows that smaller ones don't need.
        """
        groups = [
            (group, tuple(row for row in self.rows if row.group == group))
            for group in GROUPS
        ]
        groups = [(group, rows) for group, rows in groups if rows]
        left = len(self.rows) if self.max_rows is None else self.max_rows
        shares = {}
        by_size = sorted(groups, key=lambda pair: len(pair[1]))
        for index, (group, rows) in enumerate(by_size):
            shares[group] = min(len(rows), left // (len(by_size) - index))
            left -= shares[group]
        for group, rows in groups:
            yield group, rows[: shares[group]], rows[shares[group] :]

    def plot(self, axes: object = None) -> Any:
        """Draws the bytes that each device of this worker keeps.

        Each device has a line, as long as all variables together. What it
        keeps is coloured: the parts of sharded variables too, which are drawn
        one after the other in the order of the devices. On the right are the
        bytes that the device keeps. The legend leaves groups out that are less
        than 1 % of all bytes. A notebook shows the figure if it is a cell's
        last value. It needs `pip install "keras-dist[plot]"`.

        Args:
            axes: Axes of matplotlib to draw on, without a title and a legend.
                Default: those of a new figure, which pyplot does not know.

        Returns:
            The `matplotlib.figure.Figure`. `savefig` writes it to a file.

        Raises:
            ImportError: If matplotlib is not installed.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([
        ...         keras.Input((3,)), keras.layers.Dense(4)], name="net")
        >>> figure = keras_dist.summary(model).plot()
        >>> figure.axes[0].get_title(loc="left")
        "What each device keeps of 'net'"
        """
        from keras_dist.tools.summary_picture import draw_summary

        return draw_summary(
            f"What each device keeps of '{self.model}'",
            self.rows,
            self.device_names,
            axes,
        )

    def __repr__(self) -> str:
        return (
            f"<Summary of '{self.model}': {len(self.rows)} variables on "
            f"{', '.join(self.device_names)}>"
        )

    def __rich__(self) -> tables.TableReport:
        of = f", {self.strategy}" if self.strategy else ""
        shown = [
            tables.table(
                f"Variables of '{self.model}'{of}",
                ("Variable", tables.WORDS),
                ("Shape", tables.WORDS),
                ("Dtype", tables.WORD),
                ("Kind", tables.WORD),
                ("Devices", tables.WORDS),
                ("Bytes", tables.NUMBER),
                rows=_variables(self),
            ),
            tables.table(
                "Each device keeps",
                ("Device", tables.WORDS),
                *((group.capitalize(), tables.NUMBER) for group in GROUPS),
                ("Total", tables.NUMBER),
                rows=_devices(self),
            ),
        ]
        if self.transfers:
            shown.append(tables.transfer_table(self.transfers))
        return tables.TableReport("", shown, self.notes)


def _variables(summary: Summary) -> Iterator[Sequence[Any]]:
    blank = ("", "", "", "")
    for group, shown, hidden in summary.shown_rows():
        total = Text(_sum((*shown, *hidden)), style="bold")
        yield (Text(group, style="bold"), *blank, total)
        for row in shown:
            yield (
                Text(f"  {row.path}"),
                str(row.shape),
                row.dtype,
                row.kind,
                tables.names_text(row.devices),
                tables.bytes_text(row.num_bytes),
            )
        if hidden:
            count = len(hidden)
            text = f"{count} variable{'' if count == 1 else 's'}"
            if shown:
                text = f"and {count} more"
            yield (Text(f"  {text}", style="italic"), *blank, _sum(hidden))


def _sum(rows: Sequence[VariableRow]) -> str:
    return tables.bytes_text(sum(row.num_bytes for row in rows))


def _devices(summary: Summary) -> Iterator[Sequence[str]]:
    """Yields a row for each set of devices that keep the same."""
    pairs = ((device.device, device.of_groups) for device in summary.devices)
    for names, of_groups in tables.alike(pairs):
        numbers = (*of_groups, sum(of_groups))
        yield (names, *map(tables.bytes_text, numbers))


def summary(model: keras.Model, max_rows: int | None = 60) -> Summary:
    """Counts the bytes that devices keep of a model and that a step sends.

    The bytes that devices keep are exact: each device has a copy of a mirrored
    variable, one parameter device has a central variable, and each device has
    a shard of a sharded variable, padded to equal sizes.

    The bytes that a step of `fit` sends are estimated, from `T` bytes of
    trainable variables (and so of gradients) and `n` replicas of a worker. In
    a ring all-reduce each device sends `2 (n - 1) / n T` bytes (Patarasuk and
    Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations"). With a sharded optimizer state, a reduce-scatter of
    gradients and an all-gather of parameters send as much together
    (Rajbhandari et al., 2020, "ZeRO"); JAX on CPU devices sends 1.5 times as
    much, because XLA sums whole gradients there. With central variables, all
    of the model's variables go to each replica on another device, which sends
    `T` bytes of gradients back. With `W` workers, each sends `2 (W - 1) / W T`
    bytes more, after it has added up its own devices' gradients. With several
    logical devices a replica, `T` is the bytes on all of them, and each sends
    the gradients of its own parts to the other replicas. What they send each
    other is not estimated.

    Args:
        model: A built `keras.Model`, under any strategy or none.
        max_rows: Integer, number of variables to show, or `None` for all. All
            variables are counted in any case. Default 60.

    Returns:
        A `Summary`, which `print` and notebooks show. `rows` has the
        variables, `devices` the totals of devices, and `transfers` the
        transfers of a step. Numbers are bytes.

    Raises:
        ValueError: If `model` is no `keras.Model`, or is not built.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([
    ...         keras.Input((3,)), keras.layers.Dense(4, use_bias=False)])
    >>> summary = keras_dist.summary(model)
    >>> summary.rows[0].kind, summary.rows[0].devices, summary.rows[0].num_bytes
    ('mirrored', ('cpu:0', 'cpu:1'), 48)
    >>> [(device.device, device.num_bytes) for device in summary.devices]
    [('cpu:0', 48), ('cpu:1', 48)]
    >>> summary.bytes_sent
    96
    """
    counting.check_built(model)
    if max_rows is not None and max_rows < 0:
        raise ValueError(
            "`max_rows` must be the number of variables to show. Received: "
            f"{max_rows}. Expected: an integer of at least 0, or `None` for "
            "all."
        )
    rows = counting.rows_of(model)
    notes = []
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        notes.append(_NO_SLOTS)
    binding = bound(model)
    if binding is None:
        names = tuple(dict.fromkeys(d for row in rows for d in row.devices))
        notes.append(_PLAIN)
        return Summary(model.name, "", rows, names, (), tuple(notes), max_rows)
    plan = binding.strategy.plan
    placement = counting.placement_of(plan)
    load, kept = counting.load_of_replica(model, plan), counting.kept_of(model)
    sent = transfers(load, placement, kept)
    if sent:
        notes.append(_ESTIMATED)
    if plan.num_logical_devices > 1:
        notes.append(_LOGICAL)
    elif not sent:
        notes.append(_ONE_REPLICA)
    return Summary(
        model.name,
        repr(binding.strategy).strip("<>"),
        rows,
        placement.all_devices,
        sent,
        tuple(notes),
        max_rows,
    )
