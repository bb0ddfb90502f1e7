"""README's table of what works where is what this test found."""

import inspect
import pathlib

import pytest

from docs.probes import PROBES
from parity.harness import BACKEND
from tables import WRITES
from tables import MarkdownTable

README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.mark.runs_on("torch")
def test_the_table_says_what_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {}
    for label, probe in PROBES.items():
        takes_folder = "folder" in inspect.signature(probe).parameters
        found[label] = probe(tmp_path) if takes_folder else probe()
    table = MarkdownTable(README, "status")
    if WRITES:
        table.write(BACKEND, found)
    else:
        assert table.column(BACKEND) == found
