"""Workers that stay: the tests of a session share one cluster of each shape.

Starting a worker is most of what a short job takes. A job is a file in a folder
that the cluster's workers look into, and so is each worker's result.
"""

import atexit
import functools
import gc
import importlib
import itertools
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import numpy as np

SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_TO_END = 20


def run(fn, args=(), *, workers, devices, timeout):
    """Calls a function on each worker of a cluster that stays.

    Args:
        fn: A module's function. It makes its strategy itself.
        args: Tuple, its arguments, which can be pickled.
        workers: Integer, how many workers there are.
        devices: Integer, how many devices each one has.
        timeout: Float, in how many seconds all results have to be there.

    Returns:
        List, what each worker's call returned.

    Raises:
        RuntimeError: A call raised, or the cluster ended.
        TimeoutError: The time is over.
    """
    cluster = _cluster(workers, devices)
    try:
        return cluster.run(fn, args, timeout)
    except BaseException:
        # The workers may wait for each other.
        _cluster.cache_clear()
        cluster.end()
        raise


def on_workers(workers=2, devices=1, timeout=300):
    """Makes a test of a function that each worker of a cluster calls.

    Workers get the test's parameters and what its fixtures are; a parameter
    `shape` has the numbers of workers and of devices. What the calls return
    has to be the same on all workers.
    """

    def decorate(fn):
        @functools.wraps(fn)
        def test(**given):
            shape = given.get("shape", (workers, devices))
            place = fn.__module__, fn.__name__, given
            first, *others = run(
                _call,
                place,
                workers=shape[0],
                devices=shape[1],
                timeout=timeout,
            )
            for other in others:
                np.testing.assert_equal(other, first)

        test.on_each_worker = fn
        return test

    return decorate


def _call(module, name, given):
    test = getattr(importlib.import_module(module), name)
    return test.on_each_worker(**given)


@functools.cache
def _cluster(workers, devices):
    cluster = _Cluster(workers, devices)
    atexit.register(cluster.end)
    return cluster


class _Cluster:
    """A process that launched workers, and the folder of their jobs."""

    def __init__(self, workers, devices):
        self._folder = pathlib.Path(tempfile.mkdtemp())
        self._numbers = itertools.count()
        self._workers = workers
        self._output = (self._folder / "output").open("wb")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "workers.clusters"),
                *(str(self._folder), str(workers), str(devices)),
            ],
            cwd=pathlib.Path(__file__).parents[1],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            # It is closed when this process ends, however that happens.
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def run(self, fn, args, timeout):
        deadline = time.monotonic() + timeout
        number = next(self._numbers)
        _write(self._folder / f"{number}", (fn, args))
        return [
            self._result(self._folder / f"{number}.{worker}", deadline)
            for worker in range(self._workers)
        ]

    def _result(self, path, deadline):
        while not path.exists():
            if self._process.poll() is not None:
                raise RuntimeError(f"The cluster ended:\n{self._shown()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"No result in time:\n{self._shown()}")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        is_error, found = pickle.loads(path.read_bytes())
        if is_error:
            raise RuntimeError(f"A worker's call raised:\n{found}")
        return found

    def _shown(self):
        return (self._folder / "output").read_text(errors="replace")

    def end(self):
        """Ends the workers, between two jobs or within one."""
        if self._process.poll() is None:
            _write(self._folder / f"{next(self._numbers)}", None)
            try:
                self._process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait()
        self._process.stdin.close()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _write(path, thing):
    """All of a file is there, or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(pickle.dumps(thing))
    partial.rename(path)


def serve(folder):
    """A worker's program: runs the jobs until there are no more."""
    import keras

    import quicker

    quicker.compile_less()
    worker = os.environ["KERAS_DIST_WORKER_INDEX"]
    for number in itertools.count():
        path = pathlib.Path(folder, str(number))
        while not path.exists():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        job = pickle.loads(path.read_bytes())
        if job is None:
            return
        fn, args = job
        # Collecting what the job leaves then looks at nothing older.
        gc.freeze()
        try:
            result = (False, fn(*args))
        except Exception:  # it is raised where the job was given
            result = (True, traceback.format_exc())
        _write(path.with_name(f"{number}.{worker}"), result)
        keras.utils.clear_session()
        if keras.backend.backend() == "jax":
            import jax

            jax.clear_caches()


def _end_with_the_tests():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    import keras_dist
    from workers.clusters import serve as serve_jobs

    folder, workers, devices = sys.argv[1:]
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    keras_dist.launch(
        serve_jobs, (folder,), workers=int(workers), devices=int(devices)
    )
