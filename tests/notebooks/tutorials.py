"""The tutorials' files, and the environment in which a reader runs them."""

import hashlib
import os
import pathlib
import re

import without

from runs import alone
from runs.runs import ALSO

TOP = pathlib.Path(__file__).parents[2]
FOLDER = TOP / "tutorials"
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
# The name of what our command notes in a notebook's metadata.
NOTE = "keras_dist"
# What a cell may write to stderr: how workers were found.
OF_WORKERS = re.compile(r"(\[worker \d+\] keras_dist: .*\n)+")


def environment_of_a_reader(backend):
    """Returns environment variables for a program of a tutorial.

    Args:
        backend: String, the one framework that the reader has.
    """
    # What the tests need to be alone in a process is not for readers.
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KERAS_DIST_")
    }
    found["KERAS_BACKEND"] = backend
    hidden = found.get(without.VARIABLE) or alone.hidden(
        backend, "test", also=ALSO.get(backend, ())
    )
    found[without.VARIABLE] = hidden
    return found


def environment_of_a_writer(backend):
    """Returns the same, for a program that uses the code of this checkout."""
    found = environment_of_a_reader(backend)
    folders = [TOP, TOP / "backends", TOP / "tests" / "lean"]
    others = filter(None, [found.get("PYTHONPATH")])
    found["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *others])
    found["TF_CPP_MIN_LOG_LEVEL"] = "2"
    found.pop("COLUMNS", None)  # 80, as wherever there is no terminal
    return found


def hash_of(script):
    """Returns the SHA-256 of a script, in hexadecimal digits."""
    return hashlib.sha256(script.read_bytes()).hexdigest()
