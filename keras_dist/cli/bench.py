"""The commands of `keras-dist bench`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Literal

import typer

from keras_dist.cli.commands import CliCommand
from keras_dist.cli.commands import CliGroup
from keras_dist.cli.environment import CPU_ONLY
from keras_dist.cli.environment import Backend
from keras_dist.cli.environment import check_folder
from keras_dist.cli.environment import fail
from keras_dist.cli.environment import require
from keras_dist.cli.environment import select_backend
from keras_dist.cli.json_option import JsonFile
from keras_dist.cli.json_option import is_stdout
from keras_dist.cli.json_option import stdout_kept_for
from keras_dist.cli.log_noise import without_log_noise

if TYPE_CHECKING:
    from keras_dist.bench.report import Output

bench = typer.Typer(
    name="bench",
    cls=CliGroup,
    help="Measure fit, loops, workers and memory, beside the framework's own.",
    no_args_is_help=True,
)

# File name extensions that --plot takes.
PICTURES = (".png", ".svg", ".pdf")

REPLICAS = Annotated[
    str,
    typer.Option(
        help="Numbers of replicas, with commas, or all: 1, 2, 4 and so on."
    ),
]
MODELS = Annotated[
    str, typer.Option(help="Some of small, medium, with commas.")
]
ROUNDS = Annotated[
    int,
    typer.Option(
        min=1, help="Blocks of each arm, in turns; verdicts need 5 or more."
    ),
]
BLOCK_MS = Annotated[
    int, typer.Option(min=1, help="About how many milliseconds a block takes.")
]
DEVICE = Annotated[
    Literal["cpu", "gpu"],
    typer.Option(help="Replicas on virtual CPU devices, or on GPUs."),
]
PLOT = Annotated[
    Path | None,
    typer.Option(help="File for a picture, .png.", dir_okay=False),
]
MARKDOWN = Annotated[
    bool, typer.Option("--markdown", help="Print Markdown, for a page.")
]


@bench.command(cls=CliCommand)
def fit(
    replicas: REPLICAS = "1,2",
    models: Annotated[
        str | None,
        typer.Option(
            help="Some of small, medium, with commas.",
            show_default="small,medium; with --model, none",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Your model: a function without arguments that returns "
            "(model, x, y), a compiled model and NumPy arrays.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Global batch of --model.")
    ] = 64,
    rounds: ROUNDS = 15,
    block_ms: BLOCK_MS = 150,
    device: DEVICE = "cpu",
    json: JsonFile = None,
    plot: PLOT = None,
    markdown: MARKDOWN = False,
    backend: Backend = None,
) -> None:
    """Compare fit under a strategy with plain Keras and the framework's own.

    The arms take turns in this process. Results are ratios of step times,
    beside the ratio of plain Keras to a copy of itself, which shows the noise.
    Ends with 0 once it has measured, whatever the result, 2 if it cannot run.
    """
    counts = numbers_or_all(replicas)
    wanted = []
    if models is not None or model is None:
        wanted = some_models("small,medium" if models is None else models)
    users = None if model is None else (model, batch_size)
    with prepared(backend, json, plot, markdown, own_devices=True) as output:
        from keras_dist.bench.fit import run_fit

        seconds = block_ms / 1e3
        run_fit(counts, wanted, users, device, rounds, seconds, output)


@bench.command(cls=CliCommand)
def loops(
    replicas: REPLICAS = "1,2",
    models: MODELS = "small,medium",
    rounds: ROUNDS = 15,
    block_ms: BLOCK_MS = 100,
    device: DEVICE = "cpu",
    json: JsonFile = None,
    plot: PLOT = None,
    markdown: MARKDOWN = False,
    backend: Backend = None,
) -> None:
    """Compare the portable training loop with the framework's own.

    The loops take turns in this process. Results are ratios of step times,
    beside the ratio of a loop to a copy of itself, which shows the noise. Ends
    with 0 once it has measured, whatever the result, 2 if it cannot run.
    """
    counts = numbers_or_all(replicas)
    wanted = some_models(models)
    with prepared(backend, json, plot, markdown, own_devices=True) as output:
        from keras_dist.bench.portable import run_loops

        run_loops(counts, wanted, device, rounds, block_ms / 1e3, output)


@bench.command(cls=CliCommand)
def workers(
    workers: Annotated[
        int, typer.Option(min=2, help="Workers to start on this machine.")
    ] = 2,
    models: MODELS = "small,medium",
    rounds: ROUNDS = 15,
    block_ms: BLOCK_MS = 200,
    device: Annotated[
        Literal["cpu", "gpu"],
        typer.Option(help="Workers on CPUs, or with a GPU for each."),
    ] = "cpu",
    json: JsonFile = None,
    plot: PLOT = None,
    markdown: MARKDOWN = False,
    backend: Backend = None,
) -> None:
    """Compare training over workers with the framework's own distribution.

    Starts workers on this machine. All workers run the same loop at the same
    time, and the loops take turns. Results are ratios of step times, beside the
    ratio of the native loop to a copy of itself, which shows the noise. Ends
    with 0 once it has measured, whatever the result, 2 if it cannot run.
    """
    wanted = some_models(models)
    on_cpus = device == "cpu"
    with prepared(
        backend, json, plot, markdown, own_devices=True, only_cpus=on_cpus
    ) as output:
        from keras_dist.bench.workers import run_workers

        run_workers(workers, wanted, device, rounds, block_ms / 1e3, output)


@bench.command(cls=CliCommand)
def memory(
    devices: Annotated[
        int, typer.Option(min=1, help="Virtual CPU devices that compute.")
    ] = 4,
    params: Annotated[
        str,
        typer.Option(
            metavar="NUMBER", help="About how many parameters: 20000, 2e7, 20M."
        ),
    ] = "20M",
    json: JsonFile = None,
    plot: PLOT = None,
    markdown: MARKDOWN = False,
    backend: Backend = None,
) -> None:
    """Count the bytes on devices under each strategy, beside the planned ones.

    Trains a model with Adam for one step: in plain Keras, mirrored, central,
    and with the optimizer's state sharded if the backend can. Central variables
    are on an additional device. Ends with 0 once it has measured, 2 if it
    cannot run.
    """
    # Imported late: rich would delay every command's start.
    from keras_dist.planning.tables import read_number

    try:
        count = read_number(params)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--params") from error
    with prepared(backend, json, plot, markdown, only_cpus=True) as output:
        from keras_dist.bench.memory import run_memory

        run_memory(devices, count, output)


@contextmanager
def prepared(
    backend: str | None,
    json: Path | None,
    plot: Path | None,
    markdown: bool,
    own_devices: bool = False,
    only_cpus: bool = False,
) -> "Iterator[Output]":
    """Checks the options before anything is measured; yields the `Output`."""
    check_folder("--json", json)
    if markdown and is_stdout(json):
        fail(
            "--markdown: --json without a file prints JSON and nothing else. "
            "Write a file's name after --json, or leave one of the two out."
        )
    check_folder("--plot", plot)
    if plot is not None:
        if plot.suffix.lower() not in PICTURES:
            fail(
                f"--plot {plot}: this kind of picture can't be drawn. "
                f"Expected: a name that ends with {', '.join(PICTURES)}."
            )
        require("matplotlib", "matplotlib for --plot", "plot")
    select_backend(backend)
    if own_devices:  # the command sets the number of devices itself
        os.environ.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    if only_cpus:
        os.environ.update(CPU_ONLY)
    with without_log_noise():  # the import of Keras
        from keras_dist.bench.report import Output
    from keras_dist.errors import KerasDistError

    try:
        with stdout_kept_for(json) as print_json:
            file = None if print_json else json
            yield Output(file, plot, markdown, print_json)
    except (KerasDistError, ValueError) as error:
        fail(str(error))


def numbers_or_all(text: str) -> list[int] | None:
    """Parses comma-separated integers from 1; returns `None` for `all`."""
    if text.strip() == "all":
        return None
    parts = names(text)
    if not parts or not all(p.isdecimal() and int(p) >= 1 for p in parts):
        raise typer.BadParameter(
            f"Received: {text!r}. Expected: numbers of at least 1, separated "
            "by commas, such as 1,2, or all."
        )
    return [int(part) for part in parts]


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def some_models(text: str) -> list[str]:
    wanted = names(text)
    if not wanted:
        raise typer.BadParameter("Expected: at least one of small, medium.")
    return wanted
