"""The file in which a run of pytest leaves what it found out."""

import json
import os
import pathlib

VARIABLE = "GPU_FACTS"


def path():
    """Returns the file that the command asks for, or `None`."""
    name = os.environ.get(VARIABLE)
    return None if name is None else pathlib.Path(name)


def append(file, line):
    """Writes a dict as a line of JSON."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")


def read(file):
    """Returns the dicts that were written, in order."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]
