"""Tables in Markdown files that tests fill: a column for each backend.

A table follows a line `<!-- table: NAME -->`. Its first column names the rows;
the others have backends' names as the frameworks write them. A test computes
the column of the backend that it runs on and compares; with the environment
variable `KERAS_DIST_WRITE_TABLES=1` it writes the column instead.
"""

import os
import pathlib
import re

NAMES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
WRITES = os.environ.get("KERAS_DIST_WRITE_TABLES") == "1"


def _split(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


class MarkdownTable:
    """A table of a file.

    Args:
        path: `pathlib.Path` of the Markdown file.
        name: String, as in the comment above of the table.
    """

    def __init__(self, path, name):
        self._path = pathlib.Path(path)
        self._text = self._path.read_text()
        found = re.search(
            rf"<!-- table: {re.escape(name)} -->\n+((?:\|.*\n)+)", self._text
        )
        assert found, f"{path} has no table {name!r}"
        self._span = found.span(1)
        lines = found[1].splitlines()
        self._head = _split(lines[0])
        self._rows = [_split(line) for line in lines[2:]]

    @property
    def labels(self):
        """The first cell of each row."""
        return [row[0] for row in self._rows]

    def column(self, backend):
        """Cells of a backend's column, by the label of their rows."""
        index = self._head.index(NAMES[backend])
        return {row[0]: row[index] for row in self._rows}

    def write(self, backend, cells):
        """Replaces a backend's column; rows that are new come last."""
        index = self._head.index(NAMES[backend])
        for label in cells:
            if label not in self.labels:
                blank = [""] * (len(self._head) - 1)
                self._rows.append([label, *blank])
        for row in self._rows:
            row[index] = cells[row[0]]
        rows = [self._head, ["---"] * len(self._head), *self._rows]
        lines = ["| " + " | ".join(row) + " |\n" for row in rows]
        start, end = self._span
        text = self._text[:start] + "".join(lines) + self._text[end:]
        self._path.write_text(text)
