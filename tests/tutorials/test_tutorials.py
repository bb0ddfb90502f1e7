"""The tutorials: scripts, the notebooks that are paired with them, runs."""

import os
import pathlib
import re
import subprocess
import sys

import jupytext
import nbformat
import pytest
import without

from parity.harness import BACKEND
from runs import alone
from tables import WRITES
from tables import MarkdownTable

TUTORIALS = pathlib.Path(__file__).parents[2] / "tutorials"
SCRIPTS = sorted(TUTORIALS.glob("[0-9]*.py"))
# What a reader is promised: 60 s and 1 GB on two idle cores. The tests share
# theirs with other tests, so that what counts is the time of the processor.
MAX_CPU_SECONDS = 2 * 60
MAX_MEGABYTES = 1000
TIMEOUT_SECONDS = 400
# A process begins with the peak of the one that started it, which has to be a
# small one therefore.
MEASURE = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss, file=file)
sys.exit(status)
"""

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


# Where CI runs a notebook. `tox run -e full` runs each on each backend.
RUNS_ON = {
    "1": ["jax"],
    "2": ["torch"],
    "3": ["jax"],
    "4": ["torch"],
    "5": ["torch"],
    "5b": ["jax"],
    "6a": ["tensorflow"],
    "6b": ["jax"],
    "7": ["jax"],
}


def _shared_out():
    """The scripts, each for some backends in CI."""
    for script in SCRIPTS:
        backends = RUNS_ON[script.stem.partition("_")[0]]
        yield pytest.param(
            script, marks=pytest.mark.runs_on(*backends), id=script.stem
        )


@pytest.mark.parametrize("script", list(_shared_out()))
def test_the_notebook_runs(script, tmp_path):
    seconds, megabytes = run_notebook(script.with_suffix(".ipynb"), tmp_path)
    assert seconds <= MAX_CPU_SECONDS
    assert megabytes <= MAX_MEGABYTES
    table = MarkdownTable(TUTORIALS / "README.md", "runs")
    label = f"[{script.stem}]({script.stem}.ipynb)"
    if WRITES:
        cells = table.column(BACKEND)
        cells[label] = f"runs: {seconds:.0f} s, {megabytes:.0f} MB"
        table.write(BACKEND, cells)
    else:
        assert table.column(BACKEND)[label].startswith("runs: ")


def run_notebook(notebook, folder):
    """Executes it; returns seconds of the processor, and megabytes.

    The seconds are of all processes together, the memory is the largest one's.
    """
    command = [
        *(sys.executable, "-c", MEASURE, "usage"),
        *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull),
        *("--rootdir", str(TUTORIALS), "-p", "no:cacheprovider"),
        *("-p", "kernel_sockets"),
        *("--nbmake", f"--nbmake-timeout={TIMEOUT_SECONDS}"),
        str(notebook),
    ]
    # What the tests need to be alone in a process is not for readers.
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("KERAS_DIST_")
    }
    # A reader has one framework.
    hidden = env.get(without.VARIABLE) or alone.hidden(BACKEND, "test")
    env[without.VARIABLE] = hidden
    folders = [str(pathlib.Path(__file__).parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        command,
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    seconds, kilobytes = (folder / "usage").read_text().split()
    return float(seconds), int(kilobytes) * 1024 / 1e6
