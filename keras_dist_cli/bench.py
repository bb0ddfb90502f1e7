"""`keras-dist bench`."""

import os
import pathlib
from typing import Annotated
from typing import Literal

import typer

from keras_dist_cli.environment import fail
from keras_dist_cli.environment import select_backend
from keras_dist_cli.planning.text import read_number

bench = typer.Typer(
    name="bench",
    help="Measure loops, workers and memory, beside the framework's own.",
    no_args_is_help=True,
)


@bench.callback()
def group() -> None:
    """Measure loops, workers and memory, beside the framework's own."""


def whole_numbers(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas."""
    parts = names(text)
    if not parts or not all(p.isdecimal() and int(p) >= 1 for p in parts):
        raise typer.BadParameter(
            f"Received: {text!r}. Expected: numbers of at least 1, separated "
            "by commas, such as 1,2."
        )
    return [int(part) for part in parts]


def names(text: str) -> list[str]:
    """What is between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def some_models(text: str) -> list[str]:
    """Names of models, separated by commas."""
    wanted = names(text)
    if not wanted:
        raise typer.BadParameter("Expected: at least one of small, medium.")
    return wanted


def check_folder(json: pathlib.Path | None) -> None:
    """Fails before anything is measured that could not be written."""
    if json is not None and not json.absolute().parent.is_dir():
        fail(f"--json {json}: there is no folder {json.parent}. Make it first.")


@bench.command()
def loops(
    replicas: Annotated[
        str,
        typer.Option(help="Numbers of replicas, with commas."),
    ] = "1,2",
    models: Annotated[
        str, typer.Option(help="Some of small, medium, with commas.")
    ] = "small,medium",
    rounds: Annotated[
        int, typer.Option(min=1, help="Blocks of each loop, in turns.")
    ] = 15,
    block_ms: Annotated[
        int, typer.Option(min=1, help="Milliseconds of a block, about.")
    ] = 100,
    device: Annotated[
        Literal["cpu", "gpu"],
        typer.Option(help="Replicas on virtual CPU devices, or on GPUs."),
    ] = "cpu",
    json: Annotated[
        pathlib.Path | None,
        typer.Option(help="File to write all numbers to.", dir_okay=False),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="jax, tensorflow or torch.",
            show_default="KERAS_BACKEND, else the first installed",
        ),
    ] = None,
) -> None:
    """Compare the portable training loop with the framework's own.

    All loops take turns in this process; what counts are ratios of times, and
    the ratio of a loop to its copy, which shows the noise. Ends with 0 when
    it has measured, whatever it found, 2 if it cannot run.
    """
    counts = whole_numbers(replicas)
    wanted = some_models(models)
    check_folder(json)
    select_backend(backend)
    # --replicas says how many.
    os.environ.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    from keras_dist.errors import KerasDistError
    from keras_dist.launch.bench.command import run_loops

    try:
        run_loops(counts, wanted, device, rounds, block_ms / 1e3, json)
    except (KerasDistError, ValueError) as error:
        fail(str(error))


@bench.command()
def workers(
    workers: Annotated[
        int, typer.Option(min=2, help="How many to start on this machine.")
    ] = 2,
    models: Annotated[
        str, typer.Option(help="Some of small, medium, with commas.")
    ] = "small,medium",
    rounds: Annotated[
        int, typer.Option(min=1, help="Blocks of each loop, in turns.")
    ] = 15,
    block_ms: Annotated[
        int, typer.Option(min=1, help="Milliseconds of a block, about.")
    ] = 200,
    json: Annotated[
        pathlib.Path | None,
        typer.Option(help="File to write all numbers to.", dir_okay=False),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="jax, tensorflow or torch.",
            show_default="KERAS_BACKEND, else the first installed",
        ),
    ] = None,
) -> None:
    """Compare training over workers with the framework's own distribution.

    Starts workers on this machine's CPUs. In each of them all loops take
    turns, at the same time as in the others; what counts are ratios of times,
    and the ratio of the native loop to its copy, which shows the noise. Ends
    with 0 when it has measured, whatever it found, 2 if it cannot run.
    """
    wanted = some_models(models)
    check_folder(json)
    select_backend(backend)
    # Each framework has its own way to leave GPUs alone.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    from keras_dist.errors import KerasDistError
    from keras_dist.launch.bench.worker_command import run_workers

    try:
        run_workers(workers, wanted, rounds, block_ms / 1e3, json)
    except (KerasDistError, ValueError) as error:
        fail(str(error))


@bench.command()
def memory(
    devices: Annotated[
        int, typer.Option(min=1, help="Virtual CPU devices that compute.")
    ] = 4,
    params: Annotated[
        str,
        typer.Option(
            metavar="NUMBER", help="Parameters, about: 20000, 2e7, 20M."
        ),
    ] = "20M",
    json: Annotated[
        pathlib.Path | None,
        typer.Option(help="File to write all numbers to.", dir_okay=False),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="jax, tensorflow or torch.",
            show_default="KERAS_BACKEND, else the first installed",
        ),
    ] = None,
) -> None:
    """Count what devices hold under each strategy, beside what is planned.

    Trains a model with Adam for a step: plain Keras, mirrored, central, and
    with the optimizer's state sharded where the backend can. Central
    variables are on a device more. Ends with 0 when it has measured, 2 if it
    cannot run.
    """
    try:
        count = read_number(params)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--params") from error
    check_folder(json)
    select_backend(backend)
    # Each framework has its own way to leave GPUs alone.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    from keras_dist.errors import KerasDistError
    from keras_dist.launch.bench.memory import run_memory

    try:
        run_memory(devices, count, json)
    except (KerasDistError, ValueError) as error:
        fail(str(error))
