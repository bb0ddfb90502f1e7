"""Runs a tutorial, and returns its notebook with the outputs.

What differs from run to run is left out: times, folders, random names.
"""

import itertools
import pathlib
import platform
import re
import sys
import tempfile
from importlib.metadata import version

import jupytext
import nbclient
import nbformat
from traitlets.config import Config

from notebooks.tutorials import NOTE
from notebooks.tutorials import OF_WORKERS
from notebooks.tutorials import TOP
from notebooks.tutorials import environment_of_a_writer
from notebooks.tutorials import hash_of

BACKEND = "jax"
# This one compares with `tf.distribute`, if it can.
BACKENDS = {"6a_coming_from_tf_distribute": "tensorflow"}
# Their versions are noted in the notebook, with the backend's.
PACKAGES = ("keras", "numpy", "matplotlib")
SECONDS = 300
# Colours, and what a progress bar overwrites.
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\n]*\r(?!\n)")
# What differs from run to run: a free port, and when processes meet.
_CHANCE = re.compile(r"(?<=\b127\.0\.0\.1:)\d+")
# What frameworks log of connections and of the machine.
_LOGS = re.compile(
    r"^(\[worker \d+\] )?\[Gloo\] .*\n"
    r"|^WARNING: All log messages before absl.*\n"
    r"|^INFO:tensorflow:.*\n"
    # A tutorial makes the same functions again, on purpose.
    r"|^WARNING:tensorflow:\d+ out of the last .* retracing.*\n"
    r"|^[IWE]\d{4} \d\d:\d\d:.*\n",
    re.MULTILINE,
)
_ENDS = re.compile(r"[ \t]+$", re.MULTILINE)


class OutputError(Exception):
    """A tutorial wrote what a notebook should not have."""


def run(script):
    """Returns the notebook of a script, with outputs.

    Args:
        script: `pathlib.Path` of the script.

    Raises:
        OutputError: If a cell writes to stderr, but for `OF_WORKERS`.
        nbclient.exceptions.CellExecutionError: If a cell raises an error.
    """
    backend = BACKENDS.get(script.stem, BACKEND)
    notebook = jupytext.read(script)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"  # jupytext draws random ones
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
            config=_over_files(folder),
        )
        client.execute(
            env=environment_of_a_writer(backend) | {"TMPDIR": folder}
        )
    places = {
        folder: "/tmp",
        str(TOP): "keras_dist",
        sys.prefix: "/venv",
        str(pathlib.Path.home()): "~",
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _cleaned(cell.outputs, places)
    notebook.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": notebook.metadata["kernelspec"],
        "language_info": {"name": "python"},
        NOTE: {
            "backend": backend,
            "script_sha256": hash_of(script),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in (backend, *PACKAGES)},
            },
        },
    }
    return notebook


def _over_files(folder):
    """Returns settings by which a kernel is talked to without a network."""
    manager = {"transport": "ipc", "ip": f"{folder}/kernel"}
    return Config({"KernelManager": manager})


def _cleaned(outputs, places):
    """Returns outputs without control characters and names of folders."""
    cleaned = []
    for name, found in itertools.groupby(outputs, lambda o: o.get("name")):
        found = list(found)
        if name is None:
            cleaned += found
            continue
        text = _CONTROL.sub("", "".join(each.text for each in found))
        for folder, stands_for_it in places.items():
            text = text.replace(folder, stands_for_it)
        text = _CHANCE.sub("<port>", _LOGS.sub("", text))
        text = _ENDS.sub("", text)
        if not text:
            continue
        if name == "stderr" and not OF_WORKERS.fullmatch(text):
            raise OutputError(
                "A cell wrote to stderr, which a reader takes for a fault. "
                f"Received:\n{text}\nExpected: nothing. Mend what it warns of."
            )
        cleaned.append(nbformat.v4.new_output("stream", name=name, text=text))
    return cleaned
