"""Preemption: saves the state before a machine is taken away."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from typing import TypeVar
from typing import final

import keras

from keras_dist.core import context
from keras_dist.core.options import CommunicationOptions
from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.workers import Workers
from keras_dist.plugin.workers import raise_explained
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.strategies.multi_worker_mirrored import multi_worker_plan
from keras_dist.tools.preemption_checkpoint import checkpoint_of

T = TypeVar("T")

# Seconds between two calls of a user's `termination_watcher_fn`.
_WATCH_INTERVAL = 1.0


@dataclass(frozen=True)
class TerminationConfig:
    """The way that a platform announces a worker's end, and the reaction.

    Args:
        termination_watcher_fn: Callable without arguments that returns
            `True` once this worker has been told to end. It is called at most
            once a second, after a call of `run`. Default `None`: the notice is
            the signal SIGTERM.
        exit_fn: Callable without arguments that ends the process, once
            everything has been saved. Default `None`: `sys.exit(42)`, after
            which `keras-dist run --max-restarts` restarts the workers.
        grace_period: Float, seconds for which training may continue after the
            notice. Default `None`, like 0: training ends after the first
            checkpoint.
        save_fn: Callable that saves in place of the checkpoint, on every
            worker. Default `None`: the checkpoint is saved.

    Example:

    >>> config = keras_dist.experimental.TerminationConfig(grace_period=30.0)
    >>> config.grace_period
    30.0
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None


@final
class PreemptionCheckpointHandler:
    """A handler that saves a checkpoint when a worker is told to end.

    Create it on every worker, after the variables: it restores the checkpoint
    from before a restart. After each call of `run` the workers agree, by one
    small collective, whether one of them was told to end. If so, the chief
    saves, and all workers exit with status 42, which asks for a restart. The
    collective takes about a millisecond, so let a call run several steps if
    steps are shorter than that.

    Args:
        cluster_resolver: The `ClusterResolver` of the strategy; `None` for a
            strategy of one worker.
        checkpoint_or_checkpoint_manager: A built `keras.Model`: the chief
            saves its weights, optimizer and seeds, and sends them to the other
            workers at a restart. Workers with sharded variables and a shared
            folder save in parts. Or an object with the methods `save(path)`
            and `load(path)`, a `tf.train.Checkpoint` or a `CheckpointManager`,
            whose files every worker must be able to read.
        checkpoint_dir: String, a folder. It may be `None` only for a manager,
            which has a folder of its own.
        termination_config: A `TerminationConfig`, or `None` for SIGTERM and
            exit status 42.

    Raises:
        ValueError: If the object can't be saved, or if there is no folder.
        NotImplementedError: With parameter servers.
        RuntimeError: Outside of the main thread, where no signal arrives.
        ClusterError: If other workers can't read the chief's files.

    Example:

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     handler = keras_dist.experimental.PreemptionCheckpointHandler(
    ...         None, model, folder
    ...     )
    ...     x = np.ones((4, 1))
    ...     for _ in range(handler.total_run_calls, 3):
    ...         _ = handler.run(model.fit, x, x, verbose=0)
    ...     handler.stop_watching()
    >>> handler.total_run_calls
    3
    """

    def __init__(
        self,
        cluster_resolver: object,
        checkpoint_or_checkpoint_manager: object,
        checkpoint_dir: str | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        _check_resolver(cluster_resolver)
        self._workers = _workers_of(
            checkpoint_or_checkpoint_manager, cluster_resolver
        )
        self._config = termination_config or TerminationConfig()
        self._checkpoint = checkpoint_of(
            checkpoint_or_checkpoint_manager, checkpoint_dir, self._workers
        )
        self._notice = _Notice(self._config.termination_watcher_fn)
        self._run_calls = self._checkpoint.restore()
        # After the first checkpoint: the time at which training has to end.
        self._deadline: float | None = None
        self._longest_run = 0.0

    @property
    def total_run_calls(self) -> int:
        """Number of calls of `run`, including those before restarts."""
        return self._run_calls

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a function; then saves and exits if a worker has to end.

        Args:
            fn: Callable, such as a training step or an epoch of `fit`.
            *args: Positional arguments of `fn`.
            **kwargs: Keyword arguments of `fn`.

        Returns:
            The result of `fn`.

        Raises:
            WorkerLostError: If `fn` failed on another worker, or that worker
                is gone.
        """
        with self.watch_preemption_scope():
            return fn(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Returns a context whose body counts as one call of `run`."""
        begin = time.monotonic()
        try:
            yield
            took = time.monotonic() - begin
            self._longest_run = max(self._longest_run, took)
            self.save_checkpoint_if_preempted()
        except Exception as error:
            raise_explained(error, self._workers)
            raise

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Counts a step of a loop without `run`; saves if a worker has to end.

        If a worker has to end, the chief saves and all workers exit. With a
        grace period, they continue, save again and exit before it is over.

        Args:
            *args: Positional arguments of `TerminationConfig.save_fn`, or of a
                manager's `save`.
            **kwargs: Keyword arguments of the same function.
        """
        self._run_calls += 1
        if self._deadline is not None:
            late = time.monotonic() + self._longest_run > self._deadline
            if self._any_worker(late):
                self._save(*args, **kwargs)
                self._exit()
            return
        if not self._any_worker(self._notice.has_come()):
            return
        begin = time.monotonic()
        self._save(*args, **kwargs)
        if not self._config.grace_period:
            self._exit()
            return
        # Twice the time of this checkpoint is kept free for the last one.
        spent = 2.0 * (time.monotonic() - begin)
        noticed = self._notice.time or begin
        self._deadline = noticed + self._config.grace_period - spent

    def stop_watching(self) -> None:
        """Restores the previous handler of SIGTERM."""
        self._notice.close()

    def _any_worker(self, here: bool) -> bool:
        if self._workers is None:
            return here
        return any(self._workers.concatenate_numbers([int(here)]))

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._checkpoint.save(self._run_calls, *args, **kwargs)
        # A barrier: no worker exits before the checkpoint is complete.
        self._any_worker(False)

    def _exit(self) -> None:
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            sys.exit(RESTART_EXIT_CODE)


class _Notice:
    """The notice that this worker has to end, by a watcher or SIGTERM.

    `time` is the time of the notice, or `None` before it.
    """

    def __init__(self, watcher: Callable[[], bool] | None) -> None:
        self.time: float | None = None
        self._watcher = watcher
        self._asked = float("-inf")
        self._before: Any = None
        if watcher is None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError(
                    "PreemptionCheckpointHandler was made in the thread "
                    f"'{threading.current_thread().name}', but SIGTERM "
                    "arrives only in the main thread. Make it there, or pass "
                    "a `termination_watcher_fn`."
                )
            self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def has_come(self) -> bool:
        now = time.monotonic()
        is_due = now - self._asked >= _WATCH_INTERVAL
        if self.time is None and self._watcher is not None and is_due:
            self._asked = now
            if self._watcher():
                self.time = now
        return self.time is not None

    def close(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _on_signal(self, number: int, frame: object) -> None:
        if self.time is None:
            self.time = time.monotonic()


def _check_resolver(resolver: Any) -> None:
    spec = None if resolver is None else resolver.cluster_spec()
    if spec and "ps" in spec.jobs:
        raise NotImplementedError(
            "PreemptionCheckpointHandler needs workers that train in step. "
            f"Received: a cluster with parameter servers, {spec}. Expected: a "
            "cluster without the job 'ps'."
        )


def _workers_of(checkpoint: Any, resolver: Any) -> Workers | None:
    """Returns the workers of the model, else of the scope or the resolver."""
    binding = bound(checkpoint) if isinstance(checkpoint, keras.Model) else None
    strategy: StrategyBase | None = (
        context.current_strategy() if binding is None else binding.strategy
    )
    if strategy is not None:
        return strategy.executor.workers
    if resolver is None:
        return None
    plan = multi_worker_plan(resolver, CommunicationOptions())
    return get_backend().executor(plan).workers
