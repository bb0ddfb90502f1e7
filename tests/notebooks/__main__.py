"""Runs tutorials, and writes their notebooks with outputs and pictures.

Run it in `tests/`, for all tutorials and README's picture, or for those whose
names begin so:

    python -m notebooks 1_quickstart 5
    python -m notebooks who_holds_what

It takes the cells from the scripts. So edit a script, and run this command.
"""

import argparse
import pathlib
import subprocess
import sys
import time

# A reader's kernel sees one framework; see `runs.alone`.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "lean"))

import nbformat

from notebooks import who_holds_what
from notebooks.outputs import run
from notebooks.tutorials import SCRIPTS
from notebooks.tutorials import environment_of_a_writer


def write_notebook(script):
    """Runs a script's cells; returns the path of the notebook."""
    path = script.with_suffix(".ipynb")
    notebook = run(script)  # before the file is opened: it may fail
    nbformat.write(notebook, path)
    return path


def write_picture():
    """Draws README's picture in a process of its own; returns its path."""
    subprocess.run(
        [sys.executable, who_holds_what.__file__],
        env=environment_of_a_writer(who_holds_what.BACKEND),
        check=True,
    )
    return who_holds_what.PATH


def main():
    parser = argparse.ArgumentParser(
        prog="python -m notebooks",
        description="Runs tutorials, and writes their notebooks with outputs.",
    )
    parser.add_argument(
        "names", nargs="*", help="how names begin (default: all)"
    )
    names = tuple(parser.parse_args().names) or ("",)
    writers = {
        script.stem: lambda script=script: write_notebook(script)
        for script in SCRIPTS
    }
    writers[who_holds_what.PATH.stem] = write_picture
    for name in names:
        if not any(known.startswith(name) for known in writers):
            sys.exit(
                f"No tutorial's name begins with {name!r}. Expected: "
                f"{', '.join(writers)}."
            )
    for name, write in writers.items():
        if name.startswith(names):
            start = time.monotonic()
            path = write()
            seconds = time.monotonic() - start
            kilobytes = path.stat().st_size / 1000
            print(f"{path.name}: {seconds:.0f} s, {kilobytes:.0f} kB")


if __name__ == "__main__":
    main()
