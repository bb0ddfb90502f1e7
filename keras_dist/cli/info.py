"""The command `keras-dist info`."""

import json as json_format
from typing import Annotated

import typer


def info(
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for programs.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds that a backend has to start."),
    ] = 60.0,
) -> None:
    """Print the environment, for bug reports.

    Each installed backend is tried in a process of its own. Names of hosts and
    secrets are not shown. Ends with 0, whatever the result.
    """
    from rich.console import Console

    from keras_dist.cli.inspection.report import gather
    from keras_dist.cli.inspection.report import show

    found = gather(timeout)
    if json:
        typer.echo(json_format.dumps(found, indent=2))
    else:
        show(Console(highlight=False, soft_wrap=False), found)
