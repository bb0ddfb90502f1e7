"""Summary: a model's bytes on each device, and the bytes that a step sends."""

import io
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from keras_dist_cli.planning.traffic import Transfer

GROUPS = ("trainable", "non-trainable", "optimizer", "metrics")


@dataclass(frozen=True)
class VariableRow:
    """One variable in a summary.

    Args:
        group: String, one of `"trainable"`, `"non-trainable"`, `"optimizer"`
            and `"metrics"`.
        path: String, the variable's path.
        shape: Tuple of integers.
        dtype: String.
        kind: String. `"mirrored"`: a copy on each device. `"central"`: a
            single copy, on a parameter device. `"sharded"`: a shard on each
            device. `"on-read"`: replicas may have their own values, which are
            combined when the variable is read. `"one copy"`: there is one
            replica. `"plain"`: the model has no strategy.
        num_bytes: Integer, bytes of one copy.
        kept: Tuple of pairs of a device's name and the bytes on that device.
    """

    group: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    num_bytes: int
    kept: tuple[tuple[str, int], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that keep the variable, primary first."""
        return tuple(name for name, _ in self.kept)


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
class Summary:
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
        return tuple(
            DeviceTotal(
                name,
                tuple(
                    sum(
                        num_bytes
                        for row in self.rows
                        if row.group == group
                        for device, num_bytes in row.kept
                        if device == name
                    )
                    for group in GROUPS
                ),
            )
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
        by_size = sorted(groups, key=lambda each: len(each[1]))
        for index, (group, rows) in enumerate(by_size):
            shares[group] = min(len(rows), left // (len(by_size) - index))
            left -= shares[group]
        for group, rows in groups:
            yield group, rows[: shares[group]], rows[shares[group] :]

    def show(self) -> None:
        """Prints the tables to the terminal, in colour if it has colours."""
        from rich.console import Console

        from keras_dist.summaries.table import show

        show(Console(highlight=False), self)

    def __str__(self) -> str:
        from rich.console import Console

        from keras_dist.summaries.table import show

        width = shutil.get_terminal_size().columns
        file = io.StringIO()
        show(Console(file=file, width=width, highlight=False), self)
        return file.getvalue().rstrip()

    def __repr__(self) -> str:
        return (
            f"<Summary of '{self.model}': {len(self.rows)} variables on "
            f"{', '.join(self.device_names)}>"
        )

    def _repr_html_(self) -> str:
        from keras_dist.summaries.html import html

        return html(self)


def hidden_text(num_shown: int, num_hidden: int) -> str:
    """Returns the text in place of a group's rows that are left out."""
    if num_shown:
        return f"and {num_hidden} more"
    return f"{num_hidden} variable{'' if num_hidden == 1 else 's'}"
