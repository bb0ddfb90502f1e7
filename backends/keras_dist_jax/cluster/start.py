"""Connection of a process to its cluster, before JAX starts.

A worker's process ends at once, whatever has become of the others: at exit JAX
waits for programs that never end, and aborts if its coordinator is gone.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import answer_roll
from keras_dist.plugins import facts_of
from keras_dist.plugins import numeric
from keras_dist.plugins import open_listener
from keras_dist.plugins import own_host
from keras_dist.plugins import resolve
from keras_dist_jax import runtime_internals as runtime
from keras_dist_jax.cluster.watch import Watch
from keras_dist_jax.runtime_internals import drop_clean_up

# Handlers that C calls, which must never be collected.
_KEPT: list[Any] = []


class Leaving:
    """The end of this worker's process, with the exit status for its state."""

    def __init__(self, coordinator: str) -> None:
        self.watch: Watch | None = None
        self.coordinator_lost = False
        self._coordinator = coordinator
        self._status: int | None = None
        self._before = sys.excepthook
        sys.excepthook = self._uncaught
        # Handlers run in reverse order: this one before JAX's own.
        atexit.register(self._at_exit)
        _KEPT.append(_on_abort(self._aborting))

    def _uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._status = 1
        if issubclass(kind, WorkerLostError):
            self._status = RESTART_EXIT_CODE
        elif issubclass(kind, KeyboardInterrupt):
            self._status = 128 + signal.SIGINT
        self._before(kind, error, traceback)
        if self.watch is not None:
            self.watch.fail(error, self._status)

    def _at_exit(self) -> None:
        watch = self.watch
        if self._status is None:  # no uncaught error: Python sets the status
            if watch is not None:
                watch.leave()
            if self.coordinator_lost or (watch and watch.has_raised):
                drop_clean_up()
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)

    def _aborting(self) -> None:
        """Blocks a thread that aborts because the coordinator is lost."""
        if self.watch is None or not self.watch.is_cut_off:
            if self.watch is not None:
                self.watch.end_if_apart()
            with contextlib.suppress(OSError):
                address = resolve(self._coordinator)
                socket.create_connection(address, timeout=2).close()
                return
        self.coordinator_lost = True
        if self.watch is not None:
            self.watch.coordinator_lost = True
        ctypes.CDLL(None).pause()


def _on_abort(fn: Callable[[], None]) -> Any:
    """Calls `fn` in a thread that aborts, before it does."""
    # `signal.signal` is too late: the interpreter runs its handlers once the
    # main thread gets to them, and an abort does not wait.
    library = ctypes.CDLL(None, use_errno=True)
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def handle(number: int) -> None:
        fn()
        # `fn` has returned, so the abort is another's: the handler from before
        # gets the signal when this one returns.
        library.signal(number, before)
        getattr(library, "raise")(number)

    handler = handler_type(handle)
    before = library.signal(
        signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p)
    )
    return handler


# Seconds within which all workers have to connect.
START_TIMEOUT = 300.0
# Seconds that one exchange with the coordinator may take.
_EXCHANGE = 10.0
# The chief's coordinator. Its input ends when this process ends, and then the
# coordinator ends too.
_children: list[subprocess.Popen[bytes]] = []


def join(cluster: Cluster, options: CommunicationOptions) -> Watch:
    """Connects with the other workers; JAX becomes one runtime with theirs."""
    _check(options)
    address = cluster.coordinator or cluster.leader
    coordinator = numeric(address)
    local_address = cluster.addresses[cluster.index]
    host = own_host(local_address, cluster.leader)
    if cluster.coordinator is None and cluster.is_chief:
        _start_coordinator(coordinator, cluster)
    leaving = Leaving(coordinator)
    patience = options.timeout_seconds or START_TIMEOUT
    answer_roll(cluster, patience)
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    client = runtime.new_client(coordinator, cluster.index, _EXCHANGE)
    _connect(client, leaving, address, patience)
    runtime.use_client(client, coordinator, cluster.index, cluster.num_workers)
    runtime.use_gloo(client, host)
    watch = Watch(client, cluster, options.timeout_seconds)
    leaving.watch = watch
    return watch


def _connect(
    client: Any, leaving: Leaving, address: str, patience: float
) -> None:
    """Connects with the coordinator, in a thread that can be left behind."""
    # JAX ends the process after its own timeout, which is therefore a week.
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            client.connect()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    deadline = time.monotonic() + patience
    while thread.is_alive() and not leaving.coordinator_lost:
        if time.monotonic() > deadline:
            break
        thread.join(timeout=0.1)
    if thread.is_alive() or errors:
        raise WorkerLostError(
            f"The coordinator at {address} stopped answering while workers "
            "were joining the cluster. Check whether the coordinator or the "
            "first worker was ended or stopped, and start all workers again."
        ) from (errors[0] if errors else None)


def _check(options: CommunicationOptions) -> None:
    if options.dtype is not None:
        raise ClusterError(
            "On JAX the compiler chooses the dtype in which gradients are "
            "sent, which may be a wider one.\nReceived: "
            f"dtype={options.dtype!r} in `CommunicationOptions`. Expected: "
            "None. Train in 'mixed_bfloat16', or choose the torch backend."
        )
    if runtime.num_connected():
        raise RuntimeError(
            "`jax.distributed.initialize` has been called, by this program or "
            "by its launcher.\nExpected: a strategy of several workers "
            "connects them itself. Leave out that call. With Ray's "
            "JaxTrainer, pass `jax_config=JaxConfig()`."
        )
    if runtime.has_started():
        raise RuntimeError(
            "A strategy of several workers must be created at program startup: "
            "JAX has been used already. Make the strategy before you make an "
            "array or a model, and before you list devices."
        )


def check_alone() -> None:
    """See `Backend.check_alone`."""
    number = runtime.num_connected()
    if number > 1:
        raise ClusterError(
            "No cluster was found, so each worker would train alone.\n"
            f"Received: a process that JAX connects with {number - 1} others, "
            "by `jax.distributed.initialize`. Expected: the strategy connects "
            "the workers. Leave out that call, and start the workers with "
            "`keras-dist run`, torchrun, SLURM or MPI, set TF_CONFIG, or pass "
            "a `cluster_resolver`."
        )


def _start_coordinator(address: str, cluster: Cluster) -> None:
    """Starts the coordinator, in a process that outlives this one if needed."""
    # The other workers can then say why they end, instead of being aborted.
    facts = dataclasses.asdict(facts_of(cluster))
    with open_listener(cluster) as listener:
        descriptor = listener.fileno()
        _children.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "keras_dist_jax.cluster.coordinator",
                    address,
                    json.dumps(facts),
                    str(descriptor),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                # Ctrl-C must not reach the coordinator before the workers: it
                # ends with them.
                start_new_session=True,
            )
        )
