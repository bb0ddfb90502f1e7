"""The tutorials: scripts, the notebooks that are paired with them, runs."""

import os
import pathlib
import re
import subprocess
import sys

import jupytext
import nbformat
import pytest

from notebooks import who_holds_what
from notebooks.tutorials import FOLDER
from notebooks.tutorials import NOTE
from notebooks.tutorials import OF_WORKERS
from notebooks.tutorials import SCRIPTS
from notebooks.tutorials import TOP
from notebooks.tutorials import environment_of_a_reader
from notebooks.tutorials import hash_of
from parity.harness import BACKEND
from tables import NAMES
from tables import WRITES
from tables import MarkdownTable

# What a reader is promised: 60 s and 1 GB on two idle cores. The tests share
# theirs with other tests, so that what counts is the time of the processor.
MAX_CPU_SECONDS = 2 * 60
MAX_MEGABYTES = 1000
MAX_BYTES_OF_A_NOTEBOOK = 400_000
MAX_BYTES_OF_A_PICTURE = 150_000
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


def notebook_of(script):
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@by_name
def test_the_notebook_is_that_of_the_script(script):
    notebook, expected = notebook_of(script), jupytext.read(script)
    fix = f"in tests/, run: python -m notebooks {script.stem}"
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in expected.cells
    ], fix
    note = notebook.metadata[NOTE]
    assert note.script_sha256 == hash_of(script), fix
    assert note.backend in note.versions


@by_name
def test_the_notebook_was_run_from_its_first_cell_to_its_last(script):
    cells = code_cells(notebook_of(script))
    assert [cell.execution_count for cell in cells] == [
        1 + index for index in range(len(cells))
    ]
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            if output.get("name") == "stderr":
                assert OF_WORKERS.fullmatch(output.text)
            assert output.get("execution_count") in (None, cell.execution_count)


@by_name
def test_the_notebook_has_pictures_and_is_small(script):
    pictures = [
        output.data["image/png"]
        for cell in code_cells(notebook_of(script))
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert pictures
    assert max(map(len, pictures)) <= MAX_BYTES_OF_A_PICTURE
    size = script.with_suffix(".ipynb").stat().st_size
    assert size <= MAX_BYTES_OF_A_NOTEBOOK


@by_name
def test_outputs_are_those_of_any_run_and_machine(script):
    text = script.with_suffix(".ipynb").read_text()
    for word in ("\\u001b", "\\r", str(TOP), str(pathlib.Path.home())):
        assert word not in text
    assert not re.search(r"/tmp/tmp|/tmp/[0-9a-f]{8}", text)


def test_the_index_says_what_made_the_outputs():
    page = (FOLDER / "README.md").read_text()
    for script in SCRIPTS:
        note = notebook_of(script).metadata[NOTE]
        names = NAMES | {"keras": "Keras", "python": "Python"}
        for package in ("python", "keras", note.backend):
            said = f"{names[package]} {note.versions[package]}"
            assert said in page, script.stem


@by_name
def test_each_ends_with_facts_and_names_no_backend_to_use(script):
    last = jupytext.read(script).cells[-1]
    assert last.cell_type == "code"
    assert "assert " in last.source
    text = script.read_text()
    assert not re.search(r"environ\[.KERAS_BACKEND.\] *=", text)


def test_each_has_a_line_in_the_index():
    page = FOLDER / "README.md"
    assert MarkdownTable(page, "runs").labels == [
        f"[{script.stem}]({script.stem}.ipynb)" for script in SCRIPTS
    ]


# Where CI runs a notebook. `tox run -e full` runs each on each backend, and the
# one that takes a minute.
RUNS_ON = {
    "1": ["jax"],
    "2": ["torch"],
    "3": ["torch"],
    "4": ["torch"],
    "5": ["torch"],
    "5b": [],
    "6a": ["tensorflow"],
    "6b": ["torch"],
    "7": ["torch"],
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
    table = MarkdownTable(FOLDER / "README.md", "runs")
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
        *("--rootdir", str(FOLDER), "-p", "no:cacheprovider"),
        *("-p", "kernel_sockets"),
        *("--nbmake", f"--nbmake-timeout={TIMEOUT_SECONDS}"),
        str(notebook),
    ]
    env = environment_of_a_reader(BACKEND)
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


@pytest.mark.only_on("jax", reason="the picture has sharded variables")
def test_the_readme_picture_is_drawn_from_strategies():
    texts = [
        [text.get_text() for text in axes.texts if text.get_text()]
        for axes in who_holds_what.draw().axes
    ]
    assert texts == [
        ["3 rows", "2 rows", "3 rows", "2 rows"],
        ["98.3 kB"] * 4,
        ["49.2 kB"] * 4,
        ["24.6 kB"] * 4,
    ]
    assert who_holds_what.PATH.stat().st_size < 150_000
