"""Options, checks and settings that must precede the import of Keras."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from typing import NoReturn

import typer

from keras_dist.environment.packages import BACKEND_VARIABLE
from keras_dist.environment.packages import backends

CANNOT_RUN = 2

# Each framework has its own variable to hide GPUs.
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}


def installed_backends() -> list[str]:
    """Returns the names of backends whose framework is installed."""
    return [backend.name for backend in backends() if backend.is_installed]


# The option of all commands that train or count with one backend.
Backend = Annotated[
    str | None,
    typer.Option(
        help="jax, tensorflow or torch.",
        autocompletion=installed_backends,
        show_default="KERAS_BACKEND, else the first installed",
    ),
]


def fail(message: str) -> NoReturn:
    """Ends the command with a message on standard error."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(CANNOT_RUN)


def check_backend(name: str, source: str) -> None:
    """Ends the command unless keras_dist has a backend of this name."""
    known = [backend.name for backend in backends()]
    if name not in known:
        fail(
            f"keras_dist has no backend {name!r} (from {source}). It has: "
            f"{', '.join(known)}."
        )


def select_backend(name: str | None) -> str:
    """Sets KERAS_BACKEND for this process, or ends the command.

    Without a name, it is KERAS_BACKEND's, else the first that is installed.
    """
    by_name = {backend.name: backend for backend in backends()}
    installed = [*installed_backends(), ""]
    wanted = name or os.environ.get(BACKEND_VARIABLE) or installed[0]
    if not wanted:
        fail(
            f"none of {', '.join(by_name)} is installed. Install one with its "
            "extra, for example: pip install 'keras-dist[jax]'"
        )
    check_backend(wanted, "--backend" if name else BACKEND_VARIABLE)
    if not by_name[wanted].is_installed:
        fail(
            f"the backend {wanted!r} is not installed. Install it with: "
            f"{by_name[wanted].fix}"
        )
    os.environ[BACKEND_VARIABLE] = wanted
    # TensorFlow logs CPU flags and absent GPUs at every start. Errors that come
    # later are raised in Python too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return wanted


def require(module: str, distribution: str, extra: str) -> None:
    """Ends the command unless a module can be imported; names the extra."""
    if find_spec(module) is None:
        fail(
            f"this command needs {distribution}. Install it with: "
            f"pip install 'keras-dist[{extra}]'"
        )


def check_folder(option: str, path: Path | None) -> None:
    """Fails if the folder of an output file does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        fail(
            f"{option} {path}: there is no folder {path.parent}. Make it first."
        )
