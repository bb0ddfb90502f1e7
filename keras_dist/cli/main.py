"""The `keras-dist` application; longer commands have modules of their own."""

import os
import signal
import sys
import threading
from importlib.metadata import version as version_of
from types import FrameType
from typing import Annotated
from typing import Any
from typing import Self

import typer

from keras_dist.cli.bench import bench
from keras_dist.cli.commands import CliCommand
from keras_dist.cli.commands import CliGroup
from keras_dist.cli.environment import Backend
from keras_dist.cli.environment import check_folder
from keras_dist.cli.environment import fail
from keras_dist.cli.environment import require
from keras_dist.cli.environment import select_backend
from keras_dist.cli.explain import explain
from keras_dist.cli.json_option import JsonFile
from keras_dist.cli.json_option import is_stdout
from keras_dist.cli.json_option import write_json
from keras_dist.cli.log_noise import without_log_noise
from keras_dist.cli.plan import plan
from keras_dist.cli.run import SETTINGS
from keras_dist.cli.run import run
from keras_dist.cli.self_test import self_test

# The exit status that shells use: 128 plus the number of SIGINT.
INTERRUPTED = 130


class Interrupts:
    """A context in which Ctrl-C raises KeyboardInterrupt and is remembered.

    Keras may ignore the exception: code after such a place calls `check`.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        # A background job of a shell script goes on ignoring Ctrl-C.
        if is_main and before is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a Ctrl-C, even if ignored."""
        # Keras swallows what is raised while it reads the logs of a batch,
        # where JAX spends most of the time.
        if self.received:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt


class Commands(CliGroup):
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
    if wanted:
        typer.echo(f"keras-dist {version_of('keras-dist')}")
        raise typer.Exit


app = typer.Typer(
    name="keras-dist",
    cls=Commands,
    no_args_is_help=True,
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


@app.command(cls=CliCommand)
def demo(
    context: typer.Context,
    replicas: Annotated[
        int, typer.Option(min=1, help="Number of virtual CPU devices.")
    ] = 4,
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the training digits.")
    ] = 5,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Show each epoch, and where each variable is."
        ),
    ] = False,
    backend: Backend = None,
) -> None:
    """Train on several virtual replicas and compare with one device.

    Ends with 0 if the numbers agree, 1 if they do not, 2 if it cannot run.
    """
    select_backend(backend)
    # --replicas sets the number of virtual devices.
    os.environ.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    require("sklearn", distribution="scikit-learn", extra="demo")
    from keras_dist.errors import KerasDistError

    if not sys.stderr.isatty():
        # On a terminal, a status shows it.
        typer.echo(
            f"keras-dist demo: trains a small net on {replicas} virtual "
            "replicas, and compares with one device. With the default of 5 "
            "epochs, it takes up to a minute.",
            err=True,
        )
    check = context.obj.check
    try:
        with without_log_noise() as stderr:
            from keras_dist.cli.jobs.demo import run_demo

            same = run_demo(replicas, epochs, check, stderr, verbose)
    except KerasDistError as error:
        fail(str(error))
    raise typer.Exit(0 if same else 1)


@app.command(cls=CliCommand)
def info(
    json: JsonFile = None,
    timeout: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds in which a backend must start."),
    ] = 60.0,
) -> None:
    """Print the environment, for bug reports.

    Each installed backend is tried in a process of its own. Names of hosts and
    secrets are not shown. Ends with 0, whatever the result.
    """
    from rich.console import Console

    from keras_dist.cli.info import gather
    from keras_dist.cli.info import show

    check_folder("--json", json)
    report = gather(timeout)
    if not is_stdout(json):
        show(Console(highlight=False, soft_wrap=False), report)
    write_json(json, report)


app.command(cls=CliCommand)(explain)
app.command(cls=CliCommand)(plan)
app.command("test", cls=CliCommand)(self_test)
app.command(cls=CliCommand, context_settings=SETTINGS)(run)
app.command(cls=CliCommand)(bench)
