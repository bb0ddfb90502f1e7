"""A summary: what each device keeps of a model, and what a step sends."""

import io
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from keras_dist.planning.traffic import Transfer

GROUPS = ("trainable", "non-trainable", "optimizer", "metrics")


@dataclass(frozen=True)
class VariableRow:
    """One variable.

    Args:
        group: String, one of `"trainable"`, `"non-trainable"`, `"optimizer"`
            and `"metrics"`.
        path: String.
        shape: Tuple of integers.
        dtype: String.
        kind: String. `"mirrored"`: a copy on each device. `"central"`: one,
            on a parameter device. `"sharded"`: a part on each device.
            `"on-read"`: replicas may have values of their own, which are
            combined when it is read. `"one copy"`: there is one replica.
            `"plain"`: the model has no strategy.
        num_bytes: Integer, of one copy.
        kept: Tuple of pairs, the name of a device and the bytes it keeps.
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
        """Names of the devices that keep any of it, primary first."""
        return tuple(name for name, _ in self.kept)


@dataclass(frozen=True)
class DeviceTotal:
    """What one device keeps between steps.

    Args:
        device: String, its name.
        of_groups: Tuple of integers, bytes of each of `GROUPS`.
    """

    device: str
    of_groups: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of all groups."""
        return sum(self.of_groups)


@dataclass(frozen=True, repr=False)
class Summary:
    """What `keras_dist.summary` returns; `print` shows it.

    Args:
        model: String, the model's name.
        strategy: String, what the strategy is; empty without one.
        rows: Tuple of `VariableRow`s, in the order of `GROUPS`.
        device_names: Tuple of strings, the devices of this worker.
        transfers: Tuple of `Transfer`s, what a step of `fit` sends at least.
        notes: Tuple of sentences.
        max_rows: Integer, how many variables are shown, or `None` for all.
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
        """A `DeviceTotal` of each device of this worker."""
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
        """What a step sends, from all devices of all workers together."""
        return sum(transfer.total for transfer in self.transfers)

    def shown_rows(
        self,
    ) -> Iterable[tuple[str, tuple[VariableRow, ...], tuple[VariableRow, ...]]]:
        """Of each group: its name, the rows to show, and those left out.

        All that fit are shown; else each group gets as many, and what one
        does not need goes to the next.
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
        """Prints it to the terminal, with colours where it has them."""
        from rich.console import Console

        from keras_dist.tools.summaries.table import show

        show(Console(highlight=False), self)

    def __str__(self) -> str:
        from rich.console import Console

        from keras_dist.tools.summaries.table import show

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
        from keras_dist.tools.summaries.html import html

        return html(self)


def hidden_text(num_shown: int, num_hidden: int) -> str:
    """What stands for the rows of a group that are left out."""
    if num_shown:
        return f"and {num_hidden} more"
    return f"{num_hidden} variable{'' if num_hidden == 1 else 's'}"
