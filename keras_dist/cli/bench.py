"""The command `keras-dist bench`."""

import os
from pathlib import Path
from typing import Annotated
from typing import Literal

import typer

from keras_dist.cli.environment import Backend
from keras_dist.cli.environment import check_folder
from keras_dist.cli.environment import fail
from keras_dist.cli.environment import require
from keras_dist.cli.environment import select_backend
from keras_dist.cli.json_option import JsonFile
from keras_dist.cli.json_option import is_stdout
from keras_dist.cli.json_option import stdout_kept_for
from keras_dist.cli.json_option import write_json
from keras_dist.cli.log_noise import without_log_noise
from keras_dist.cli.plan import OptimizerState
from keras_dist.cli.plan import Variables
from keras_dist.cli.plan import split_of
from keras_dist.errors import KerasDistError

# File name extensions that --plot takes.
PICTURES = (".png", ".svg", ".pdf")


def bench(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Your model: a function without arguments that returns "
            "(model, x, y), a compiled model and NumPy arrays.",
            show_default="a small built-in model",
        ),
    ] = "",
    strategy: Annotated[
        Literal["one-device", "mirrored", "central"],
        typer.Option(help="Where variables are, and which devices compute."),
    ] = "mirrored",
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices that compute.",
            show_default="all accelerators, else 2 virtual CPU devices",
        ),
    ] = None,
    optimizer_state: OptimizerState = "mirrored",
    variables: Variables = "mirrored",
    batch_size: Annotated[
        int, typer.Option(min=1, help="Rows of a global batch.")
    ] = 64,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Blocks of each arm, in turns; a verdict needs 5."
        ),
    ] = 15,
    json: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="File for a picture, .png.", dir_okay=False),
    ] = None,
    backend: Backend = None,
) -> None:
    """Compare the time of fit under a strategy with that of plain Keras.

    Your model is trained in plain Keras on one device, and under the strategy,
    in turns in this process. The result is a ratio of step times, beside the
    ratio of plain Keras to a copy of itself, which shows the noise. Ends with 0
    once it has measured, whatever the result, 2 if it cannot run.
    """
    check_folder("--json", json)
    check_folder("--plot", plot)
    if plot is not None:
        if plot.suffix.lower() not in PICTURES:
            fail(
                f"--plot {plot}: this kind of picture can't be drawn. "
                f"Expected: a name that ends with {', '.join(PICTURES)}."
            )
        require("matplotlib", "matplotlib for --plot", "plot")
    select_backend(backend)
    # --devices sets the number of virtual devices.
    os.environ.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    from keras_dist.planning.report import Choice

    choice = Choice(
        strategy, devices, split=split_of(optimizer_state, variables)
    )
    try:
        with without_log_noise() as stderr, stdout_kept_for(json):
            from keras_dist.bench import fit
            from keras_dist.bench import report

            measured = fit.run(model, batch_size, choice, rounds, stderr)
    except (KerasDistError, ValueError) as error:
        fail(str(error))
    head = report.header("bench")
    if not is_stdout(json):
        notes = report.NOTE, *report.loss_notes(measured)
        report.report_of(head, [measured], *notes).show()
    write_json(json, head | report.as_json(measured))
    if plot is not None:
        report.draw(plot, measured)
