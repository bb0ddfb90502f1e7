"""Tables in a notebook."""

from collections.abc import Iterable
from collections.abc import Sequence
from html import escape


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
