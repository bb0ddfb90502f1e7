"""The command `keras-dist test`."""

import os
import platform
from importlib.metadata import version
from typing import Annotated
from typing import Any

import typer

from keras_dist.cli.environment import check_folder
from keras_dist.cli.environment import fail
from keras_dist.cli.json_option import JsonFile
from keras_dist.cli.json_option import is_stdout
from keras_dist.cli.json_option import write_json
from keras_dist.environment.packages import BACKEND_VARIABLE
from keras_dist.environment.packages import InstalledBackend
from keras_dist.environment.packages import backends
from keras_dist.environment.packages import version_of

ALL = "all"


def self_test(
    backend: Annotated[
        str,
        typer.Option(help="jax, tensorflow, torch, or all that are installed."),
    ] = ALL,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Also train over this number of processes.",
            show_default="none",
        ),
    ] = 0,
    devices: Annotated[
        int, typer.Option(min=1, help="Largest number of virtual CPU devices.")
    ] = 4,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Your model: a function without arguments that returns "
            "(model, x, y), compiled.",
            show_default="a small built-in model",
        ),
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds for each row of results.")
    ] = 90.0,
    json: JsonFile = None,
) -> None:
    """Try keras_dist on this machine, and compare with one device.

    Each backend trains a small model in each way that it supports, in a process
    of its own; the weights must be those of plain Keras. With --model, your
    model is trained, and the first thing that differs is named, as by
    `strategy.verify`. Ends with 0 if nothing failed; 1 if something did, or if
    KERAS_BACKEND names a backend that does not work here; 2 if nothing could be
    tried.
    """
    if workers == 1:
        fail(
            "--workers 1 is one process. Expected: 2 or more. Leave --workers "
            "out to train in one process only."
        )
    check_folder("--json", json)
    chosen = _chosen(backend)
    # keras.json is not counted as a choice of the user's: Keras writes it.
    picked = os.environ.get(BACKEND_VARIABLE) if backend == ALL else None
    # Imported late, so that a command that can't run ends at once.
    from rich.console import Console

    from keras_dist.cli import info
    from keras_dist.cli import trial

    console = Console(highlight=False, stderr=is_stdout(json))
    settings = trial.Settings(
        workers, devices, timeout, model or trial.OWN_MODEL
    )
    results: list[trial.RowResult] = []
    seen: dict[str, Any] = {}
    with console.status("") as progress:
        for chosen_backend in chosen:
            rows = trial.CommandTrial(
                chosen_backend, settings, progress, results
            )
            seen[chosen_backend.name] = rows.run()
    problem = info.problem_of(
        picked or None, trial.states_of(results, list(seen))
    )
    if not is_stdout(json):
        _say_what_there_is(console, seen)
        console.print(trial.report_of(results))
        info.show_problem(console, problem)
    write_json(json, trial.as_json(results, seen, _versions(chosen), problem))
    failed = problem or trial.number_of(results, trial.Status.FAILED)
    raise typer.Exit(1 if failed else 0)


def _chosen(name: str) -> list[InstalledBackend]:
    known = backends()
    if name != ALL:
        matching = [backend for backend in known if backend.name == name]
        if not matching:
            names = ", ".join(backend.name for backend in known)
            fail(
                f"keras_dist has no backend {name!r}. It has: {names}, or all."
            )
        if not matching[0].is_installed:
            fail(
                f"the backend {name!r} is not installed. Install it with: "
                f"{matching[0].fix}"
            )
        return matching
    if not any(backend.is_installed for backend in known):
        fixes = ", or ".join(backend.fix for backend in known)
        fail(f"no backend is installed. Install one: {fixes}")
    return known


def _say_what_there_is(console: Any, seen: dict[str, Any]) -> None:
    from rich.text import Text

    from keras_dist.cli.variables import Masks
    from keras_dist.planning.tables import names_text

    masks = Masks(os.environ)
    states = {name: state for name, state in seen.items() if state is not None}
    for name, state in states.items():
        console.print(Text(f"{name} sees {names_text(state['devices'])}"))
    cluster: dict[str, Any] = next(
        (state["cluster"] for state in states.values()), {}
    )
    if cluster:
        reason = cluster.get("reason") or cluster["error"]
        console.print(Text(f"Cluster: {masks(reason)}"))
    console.print()


def _versions(chosen: list[InstalledBackend]) -> dict[str, str]:
    return {
        "keras-dist": version("keras-dist"),
        "keras": version_of("keras"),
        "python": platform.python_version(),
        **{
            backend.name: backend.version
            for backend in chosen
            if backend.is_installed
        },
    }
