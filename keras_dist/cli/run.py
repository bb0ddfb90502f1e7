"""The command `keras-dist run`."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from keras_dist.cli.environment import Backend
from keras_dist.cli.environment import fail
from keras_dist.cli.environment import select_backend

# Options after the script belong to the script.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def run(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="A Python file, or a module with -m, and its arguments.",
            show_default=False,
        ),
    ],
    workers: Annotated[
        int,
        typer.Option(
            "-n",
            "--workers",
            min=1,
            help="Number of workers, on all hosts together.",
        ),
    ],
    module: Annotated[
        bool,
        typer.Option("-m", "--module", help="SCRIPT is the name of a module."),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="All hosts, the same list on each. A host's workers listen "
            "on its port and the ports after it. On the first host, the "
            "port after those is for the coordinator, if the backend has one.",
            show_default="this machine alone, on free ports",
        ),
    ] = None,
    host_index: Annotated[
        int | None,
        typer.Option(help="This machine's position in --hosts, from 0."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Virtual CPU devices of each worker."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a file with each worker's output. The first "
            "worker's is shown too.",
            file_okay=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="How many restarts of all workers are allowed."
        ),
    ] = 0,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds in which workers must end when asked to."
        ),
    ] = 10.0,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            envvar="KERAS_DIST_INDEPENDENT",
            help="Workers need not join each other; each may train its own "
            "model. Without this option, both are errors.",
        ),
    ] = False,
    backend: Backend = None,
) -> None:
    """Run a script on several workers, on one machine or several hosts.

    Each worker is a process that runs the whole script. The script makes a
    keras_dist.MultiWorkerMirroredStrategy(), and its model in that strategy's
    scope. Example:

    keras-dist run -n 4 train.py

    When a worker fails, the others are ended and its traceback is shown. Ends
    with 0 if all workers did, else with the status of the worker that failed
    first; 1 if a worker ended without having joined the others, 2 if nothing
    could be started.
    """
    from keras_dist.environment.machine import GpusError
    from keras_dist.environment.machine import with_threads
    from keras_dist.launch.addresses import AddressLayout
    from keras_dist.launch.addresses import parse_hosts
    from keras_dist.launch.job import Job
    from keras_dist.launch.job import run_job
    from keras_dist.launch.output import Screen

    if (hosts is None) != (host_index is None):
        fail(
            "--hosts and --host-index go together: the list of all hosts, and "
            "this machine's position in it."
        )
    if not module and not Path(script[0]).exists():
        fail(
            f"there is no {script[0]!r} in {Path.cwd()}. Expected: a Python "
            "file; write -m before the name of a module."
        )
    try:
        layout = AddressLayout(
            workers, parse_hosts(hosts) if hosts else (), host_index or 0
        )
    except ValueError as error:
        fail(str(error))
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--log-dir {log_dir}: {error.strerror}. Choose another one.")
    # Copied before `select_backend`, which silences TensorFlow's log: a user's
    # script keeps its own setting.
    inherited = dict(os.environ)
    chosen = select_backend(backend)
    environment, notice = with_threads(inherited, layout.num_local)
    environment["KERAS_BACKEND"] = chosen
    environment["KERAS_DIST_INDEPENDENT"] = str(int(independent))
    screen = Screen(sys.stdout, sys.stderr)
    if notice is not None:
        screen.say(notice)
    num_local = layout.num_local
    of = "" if num_local == workers else f" of {workers}"
    screen.wait(f"Starting {num_local}{of} worker{'' if workers == 1 else 's'}")
    try:
        with tempfile.TemporaryDirectory(prefix="keras-dist-") as folder:
            job = Job(
                command=(sys.executable, *(["-m"] if module else []), *script),
                layout=layout,
                backend=chosen,
                environment=environment,
                devices=devices,
                log_dir=log_dir,
                max_restarts=max_restarts,
                grace=grace,
                joined=None if independent else Path(folder),
            )
            code = run_job(job, screen)
    except GpusError as error:
        fail(str(error))
    finally:
        screen.end_waiting()
    raise typer.Exit(code)
