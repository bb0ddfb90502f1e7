"""The tutorials: scripts, the notebooks that are paired with them, runs."""

import os
import pathlib
import re
import resource
import subprocess
import sys
import time

import jupytext
import nbformat
import pytest

from parity.harness import BACKEND
from tables import WRITES
from tables import MarkdownTable

TUTORIALS = pathlib.Path(__file__).parents[2] / "tutorials"
SCRIPTS = sorted(TUTORIALS.glob("[0-9]*.py"))
# What a reader is promised on two idle cores is 60 s and 1 GB; the tests share
# theirs with other tests.
TIMEOUT_SECONDS = 400
MAX_MEGABYTES = 1000

by_name = pytest.mark.parametrize(
    "script", SCRIPTS, ids=[script.stem for script in SCRIPTS]
)


@by_name
def test_the_notebook_is_that_of_the_script(script):
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    expected = jupytext.read(script)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in expected.cells
    ], f"run: jupytext --sync tutorials/{script.name}"
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@by_name
def test_each_ends_with_facts_and_names_no_backend_to_use(script):
    last = jupytext.read(script).cells[-1]
    assert last.cell_type == "code"
    assert "assert " in last.source
    text = script.read_text()
    assert not re.search(r"environ\[.KERAS_BACKEND.\] *=", text)


def test_each_has_a_line_in_the_index():
    page = TUTORIALS / "README.md"
    assert MarkdownTable(page, "runs").labels == [
        f"[{script.stem}]({script.stem}.ipynb)" for script in SCRIPTS
    ]


@by_name
def test_the_notebook_runs(script, tmp_path):
    started = time.monotonic()
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull),
        *("--rootdir", str(TUTORIALS), "-p", "no:cacheprovider"),
        *("--nbmake", f"--nbmake-timeout={TIMEOUT_SECONDS}"),
        str(script.with_suffix(".ipynb")),
    ]
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("KERAS_DIST_")
    }
    with open(tmp_path / "output", "w+") as output:
        # What the tests need to be alone in a process is not for readers.
        process = subprocess.Popen(
            command, env=env, cwd=tmp_path, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        assert process.returncode == 0, output.read()[-6000:]
    megabytes = _megabytes(usage)
    assert megabytes <= MAX_MEGABYTES
    table = MarkdownTable(TUTORIALS / "README.md", "runs")
    label = f"[{script.stem}]({script.stem}.ipynb)"
    if WRITES:
        seconds = time.monotonic() - started
        cells = table.column(BACKEND)
        cells[label] = f"runs: {seconds:.0f} s, {megabytes:.0f} MB"
        table.write(BACKEND, cells)
    else:
        assert table.column(BACKEND)[label].startswith("runs: ")


def _megabytes(usage: resource.struct_rusage) -> float:
    """The largest process of a run and of what it started."""
    return usage.ru_maxrss * 1024 / 1e6
