"""The option `--json [FILE]`, the same for all commands that have it."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from typing import Any

import typer

from keras_dist.cli.commands import OPTIONAL_FILE

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar=OPTIONAL_FILE,
        help="Write all results to a file, too. Without FILE: print them as "
        "JSON, and nothing else.",
        dir_okay=False,
        allow_dash=True,
        show_default=False,
    ),
]


def is_stdout(path: Path | None) -> bool:
    """Returns true if JSON is printed in place of the tables."""
    return str(path) == "-"


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Prints JSON or writes it to a file; without a path, does nothing."""
    text = json.dumps(content, indent=2)
    if is_stdout(path):
        typer.echo(text)
    elif path is not None:
        path.write_text(text + "\n")


@contextlib.contextmanager
def stdout_kept_for(
    path: Path | None,
) -> Iterator[Callable[[str], object] | None]:
    """Sends what others print to standard error, if JSON is printed.

    Yields a function that prints text when the context is left, or `None` if
    nothing is redirected.
    """
    if not is_stdout(path):
        yield None
        return
    texts: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    # Compilers and other processes write to the file descriptor.
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield texts.append
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    for text in texts:
        typer.echo(text)
