"""`launch`, which calls a function on several workers of this machine."""

import os
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import NoReturn

from keras_dist.environment import packages

if TYPE_CHECKING:
    from keras_dist.launch.call import Outcome
    from keras_dist.launch.failures import Failure


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 2,
    devices: int | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    start_method: str = "spawn",
) -> list[Any]:
    """Calls a function on several workers of this machine.

    Each worker is a new process. The function is sent by value, so it may be
    defined in a notebook. Its arguments and its result are sent by value too,
    and `cloudpickle` must be able to pickle them. Lines that workers print are
    shown with the worker's name before each.

    Make strategies, models and data in the function: devices and other state of
    a framework stay in this process.

    Args:
        fn: Callable, the function to call on each worker.
        args: Sequence of its arguments. Default none.
        kwargs: Mapping of its keyword arguments. Default none.
        workers: Integer, the number of workers. Default 2.
        devices: Integer, virtual CPU devices of each worker. Default `None`,
            the value of KERAS_DIST_VIRTUAL_DEVICES.
        backend: String, the Keras backend of the workers. Default `None`, that
            of this process.
        timeout: Float, seconds until all workers must have ended. Default
            `None`, no limit.
        start_method: String, `"spawn"`. Workers are always new processes,
            because forked ones can't work.

    Returns:
        List of the function's results, in the order of the workers.

    Raises:
        TimeoutError: If workers still ran after `timeout`. They are ended.
        RuntimeError: If a worker ended without a result, or with an exception
            that can't be pickled.
        Exception: The exception of the worker that failed first, with that
            worker's traceback as a note. The others are ended.

    Example:

    >>> from keras_dist.launch import launch
    >>> def describe(word):
    ...     import os
    ...     return f"{word} {os.environ['KERAS_DIST_WORKER_INDEX']}"
    >>> launch(describe, ("worker",), workers=2)
    ['worker 0', 'worker 1']
    """
    _check(fn, workers, devices, start_method)
    # Imported late: `python -m` runs some of these modules as programs, which
    # the import of this package must not have loaded before.
    from keras_dist.environment.machine import with_threads
    from keras_dist.launch import call
    from keras_dist.launch.addresses import AddressLayout
    from keras_dist.launch.job import Job
    from keras_dist.launch.output import Screen

    environment, _ = with_threads(os.environ, workers)
    environment["KERAS_BACKEND"] = _backend(backend)
    with tempfile.TemporaryDirectory(prefix="keras-dist-") as name:
        folder = Path(name)
        call.write_call(folder, fn, args, kwargs or {})
        job = Job(
            command=(sys.executable, "-P", "-m", call.MODULE, name),
            layout=AddressLayout(workers),
            backend=environment["KERAS_BACKEND"],
            environment=environment,
            devices=devices,
        )
        group = job.group(
            job.layout.addresses(),
            restarts=0,
            screen=Screen(sys.stdout, sys.stderr),
            on_failure=lambda failure: False,
        )
        failure = group.run(timeout)
        outcomes = {
            f"worker {i}": call.read_outcome(folder, i) for i in range(workers)
        }
    if failure is not None:
        _raise(failure, outcomes.get(failure.name))
    return [_value(name, outcome) for name, outcome in outcomes.items()]


def _check(
    fn: object, workers: object, devices: object, start_method: object
) -> None:
    if not callable(fn):
        raise TypeError(
            f"`fn` must be callable. Received: {fn!r}, which is a "
            f"{type(fn).__name__}. Pass the function itself, and its "
            "arguments in `args`."
        )
    for name, number in (("workers", workers), ("devices", devices)):
        if name == "devices" and number is None:
            continue
        if not isinstance(number, int) or number is True or number < 1:
            raise ValueError(
                f"`{name}` must be an integer of at least 1. Received: "
                f"{number!r}."
            )
    if start_method in ("fork", "forkserver"):
        raise ValueError(
            f"start_method={start_method!r} can't work.\nA forked process has "
            "the memory of this process, but only one of its threads, the "
            "one that forked. A lock that another thread held stays locked "
            "forever, and the framework that Keras has loaded here runs such "
            "threads. Expected: 'spawn', which starts new processes."
        )
    if start_method != "spawn":
        raise ValueError(
            f"`start_method` must be 'spawn'. Received: {start_method!r}."
        )


def _backend(name: str | None) -> str:
    known = [backend.name for backend in packages.backends()]
    if name is not None and name not in known:
        raise ValueError(
            f"keras_dist has no backend {name!r}. Received: backend={name!r}. "
            f"Expected: one of {', '.join(known)}, or None for the backend of "
            "this process."
        )
    if name is None:
        import keras

        name = str(keras.backend.backend())
    return name


def _value(worker: str, outcome: "Outcome | None") -> Any:
    if outcome is None:
        raise RuntimeError(
            f"{worker} ended with exit status 0, but without a result. "
            "Received: no result. Expected: a function that returns, and "
            "does not call `sys.exit` or `os._exit`."
        )
    return outcome.load()


def _raise(failure: "Failure", outcome: "Outcome | None") -> NoReturn:
    """Raises the exception of a worker as if it had been raised here."""
    if outcome is None or not outcome.traceback:
        raise RuntimeError(failure.report())
    note = f"{failure.name} raised this error:\n{outcome.traceback}"
    try:
        error = outcome.load()
    except Exception:
        # Its class can't be imported here, or its own methods raise anything.
        error = None
    if error is None:
        raise RuntimeError(note)
    error.add_note(note)
    raise error from None
