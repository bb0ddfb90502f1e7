"""The picture of a summary: which device keeps which bytes of a model."""

import itertools
from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.planning import pictures
from keras_dist.planning.tables import bytes_text
from keras_dist.tools.counting import GROUPS
from keras_dist.tools.counting import VariableRow

# What the legend calls a group, and its colour.
_LOOKS = {
    "trainable": ("weights", pictures.BLUE),
    "non-trainable": ("weights that are not trained", pictures.PALE_BLUE),
    "optimizer": ("optimizer's state", pictures.ORANGE),
    "metrics": ("metrics", pictures.GRAY),
}
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class _Segment:
    """Variables of one group that the same devices keep in the same way."""

    group: str
    start: int  # on each line
    num_bytes: int
    kept: Mapping[str, int]

    def part_on(self, device: str, has_label: bool) -> pictures.HeldPart:
        """Returns what a device keeps of these variables.

        Parts follow each other in the order of the devices. If together they
        are several copies, each copy begins at the start again.
        """
        total = self.num_bytes
        num_copies = max(1, round(sum(self.kept.values()) / total))
        num_parts = max(1, len(self.kept) // num_copies)
        index = list(self.kept).index(device) % num_parts
        before = index * total / num_parts
        # Parts are padded to equal sizes: the last one may be too long.
        length = min(self.kept[device], total - before)
        name, color = _LOOKS[self.group]
        label = name if has_label else ""
        return pictures.HeldPart(self.start + before, length, color, label)


def _segments(rows: Sequence[VariableRow]) -> Iterator[_Segment]:
    """Yields all variables, those that are kept alike together."""

    def alike(row: VariableRow) -> tuple[int, str, tuple[str, ...]]:
        return GROUPS.index(row.group), row.kind, row.devices

    start = 0
    for _, group in itertools.groupby(sorted(rows, key=alike), alike):
        members = list(group)
        kept: Counter[str] = Counter()
        for row in members:
            kept.update(dict(row.kept))
        num_bytes = sum(row.num_bytes for row in members)
        if num_bytes:
            yield _Segment(members[0].group, start, num_bytes, kept)
            start += num_bytes


def draw_summary(
    title: str,
    rows: Sequence[VariableRow],
    device_names: Sequence[str],
    axes: object = None,
) -> Any:
    """Draws the bytes that devices keep; implements `Summary.plot`."""
    whole = sum(row.num_bytes for row in rows)
    of_groups: Counter[str] = Counter()
    for row in rows:
        of_groups[row.group] += row.num_bytes
    named = {
        group for group in GROUPS if of_groups[group] >= _LEAST_SHARE * whole
    }
    segments = list(_segments(rows))
    lines = []
    for device in device_names:
        parts = [
            segment.part_on(device, segment.group in named)
            for segment in segments
            if device in segment.kept
        ]
        total = sum(dict(row.kept).get(device, 0) for row in rows)
        lines.append(pictures.Line(device, tuple(parts), bytes_text(total)))
    return pictures.draw_bytes(lines, whole, title, bytes_text, axes)
