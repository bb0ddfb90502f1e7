"""The command `keras-dist demo`."""

import os
from typing import Annotated

import typer

from keras_dist.cli.environment import Backend
from keras_dist.cli.environment import fail
from keras_dist.cli.environment import require
from keras_dist.cli.environment import select_backend


def demo(
    context: typer.Context,
    replicas: Annotated[
        int, typer.Option(min=1, help="Number of virtual CPU devices.")
    ] = 4,
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the training digits.")
    ] = 5,
    backend: Backend = None,
) -> None:
    """Train on several virtual replicas and compare with one device.

    Ends with 0 if the weights agree, 1 if they do not, 2 if it cannot run.
    """
    select_backend(backend)
    # --replicas sets the number of virtual devices.
    os.environ.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    require("sklearn", distribution="scikit-learn", extra="demo")
    from keras_dist.cli.jobs.demo import run_demo
    from keras_dist.errors import KerasDistError

    try:
        same = run_demo(replicas, epochs, context.obj.check)
    except KerasDistError as error:
        fail(str(error))
    raise typer.Exit(0 if same else 1)
