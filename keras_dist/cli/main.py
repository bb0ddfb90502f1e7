"""The `keras-dist` application; each subcommand is in a module of its own."""

import signal
import threading
from importlib.metadata import version as version_of
from types import FrameType
from types import TracebackType
from typing import Annotated
from typing import Any
from typing import Self

import typer
from typer.core import TyperGroup

from keras_dist.cli.bench import bench
from keras_dist.cli.demo import demo
from keras_dist.cli.info import info
from keras_dist.cli.plan import plan
from keras_dist.cli.run import SETTINGS
from keras_dist.cli.run import run
from keras_dist.cli.self_test.command import self_test

# The exit status that shells use: 128 plus the number of SIGINT.
INTERRUPTED = 130


class Interrupts:
    """A context in which Ctrl-C raises KeyboardInterrupt and is remembered.

    Keras ignores every exception that is raised while it reads the logs of a
    batch, where JAX spends most of the time. Code that runs after such a place
    calls `check`. A process that was started with Ctrl-C ignored, such as a
    background job of a shell script, goes on ignoring it. `received` is true
    after a Ctrl-C.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and before is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a Ctrl-C, even if ignored."""
        if self.received:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt


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
