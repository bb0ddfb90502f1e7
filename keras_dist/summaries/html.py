"""HTML tables of a summary, for notebooks."""

from collections.abc import Iterable
from collections.abc import Sequence
from html import escape

from keras_dist.summaries.data import GROUPS
from keras_dist.summaries.data import Summary
from keras_dist.summaries.data import hidden_text
from keras_dist.summaries.table import same_devices
from keras_dist_cli.planning.tables import TRANSFER_COLUMNS
from keras_dist_cli.planning.tables import TRANSFER_TITLE
from keras_dist_cli.planning.tables import transfer_rows
from keras_dist_cli.planning.text import bytes_text
from keras_dist_cli.planning.text import names_text


def html(summary: Summary) -> str:
    """Returns the tables of a summary as HTML."""
    of = f", {summary.strategy}" if summary.strategy else ""
    parts = [
        html_table(
            f"Variables of '{summary.model}'{of}",
            ("Variable", "Shape", "Dtype", "Kind", "Devices", "Bytes"),
            _variables(summary),
        ),
        html_table(
            "Each device keeps",
            ("Device", *(group.capitalize() for group in GROUPS), "Total"),
            (
                (names, *map(bytes_text, groups), bytes_text(sum(groups)))
                for names, groups in same_devices(summary)
            ),
        ),
    ]
    if summary.transfers:
        parts.append(
            html_table(
                TRANSFER_TITLE,
                [head for head, _ in TRANSFER_COLUMNS],
                transfer_rows(summary.transfers),
            )
        )
    notes = "".join(f"<p>{escape(note)}</p>" for note in summary.notes)
    return f"<div>{''.join(parts)}{notes}</div>"


def _variables(summary: Summary) -> Iterable[Sequence[str]]:
    for group, shown, hidden in summary.shown_rows():
        total = sum(row.num_bytes for row in (*shown, *hidden))
        yield (group, "", "", "", "", bytes_text(total))
        for row in shown:
            yield (
                row.path,
                str(row.shape),
                row.dtype,
                row.kind,
                names_text(row.devices),
                bytes_text(row.num_bytes),
            )
        if hidden:
            rest = sum(row.num_bytes for row in hidden)
            text = hidden_text(len(shown), len(hidden))
            yield (text, "", "", "", "", bytes_text(rest))


def html_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
    """Returns a table as HTML; a row has a string for each column."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr>"
        f"</thead><tbody>{body}</tbody></table>"
    )
