"""The `keras-dist` application; each subcommand is in a module of its own."""

from importlib.metadata import version as version_of
from typing import Annotated
from typing import Any

import typer
from typer.core import TyperGroup

from keras_dist.cli.bench import bench
from keras_dist.cli.demo import demo
from keras_dist.cli.info import info
from keras_dist.cli.interrupts import Interrupts
from keras_dist.cli.plan import plan
from keras_dist.cli.run import SETTINGS
from keras_dist.cli.run import run
from keras_dist.cli.self_test import self_test

# The exit status that shells use: 128 plus the number of SIGINT.
INTERRUPTED = 130


class Commands(TyperGroup):
    """A group of commands that a Ctrl-C ends, even one that Keras ignored."""

    def invoke(self, ctx: Any) -> Any:
        with Interrupts() as interrupts:
            ctx.obj = interrupts
            try:
                result = super().invoke(ctx)
                if not interrupts.received:
                    return result
            except KeyboardInterrupt:
                pass
            except Exception:
                # Code that a Ctrl-C interrupted may raise another exception.
                if not interrupts.received:
                    raise
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED)


def print_version(wanted: bool) -> None:
    """Prints the version and ends the command if `wanted`."""
    if wanted:
        typer.echo(f"keras-dist {version_of('keras-dist')}")
        raise typer.Exit


app = typer.Typer(
    name="keras-dist",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def keras_dist(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Keras 3 on several devices, with the numbers of one."""


app.command()(demo)
app.command()(info)
app.command()(plan)
app.command("test")(self_test)
app.command(context_settings=SETTINGS)(run)
app.add_typer(bench)
