"""Processes that run Keras' tests, plain or in a scope."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from clients.strategies import PLAIN
from xla_flags import xla_flags

TESTS = pathlib.Path(__file__).parents[1]


def keras_folder():
    """The folder of Keras' sources, which has its tests too."""
    spec = importlib.util.find_spec("keras")
    return pathlib.Path(spec.origin).parent / "src"


def outcomes(tests, backend, strategy, says=lambda text: None, folder=None):
    """Runs tests, in more than one process where one dies.

    Args:
        tests: List of strings, folders, files or tests as pytest takes them,
            relative to `folder`.
        backend: String, the value of `KERAS_BACKEND`.
        strategy: String, one of `STRATEGIES` or `PLAIN`.
        says: Callable that is told, in a string, what is going on.
        folder: Path of the tests; Keras' own by default.

    Returns:
        Dict from each test to a pair of its outcome, `"passed"`, `"failed"`,
        `"skipped"` or `"not collected"`, and the line that it failed with.
    """
    found, folder = {}, folder or keras_folder()
    tests = [str(folder / test) for test in tests]
    while True:
        new, has_ended, output = _one_process(
            folder, tests, backend, strategy, found
        )
        if not has_ended and new.keys() <= found.keys():
            raise RuntimeError(f"Keras' tests could not be run.\n{output}")
        found.update(new)
        if has_ended:
            return found
        says(f"{strategy}: the process ended in {list(new)[-1]}")


def _one_process(root, tests, backend, strategy, known):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "known").write_text("\n".join(known))
        (path / "outcomes").touch()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--no-header"),
                *("--tb=short", "-p", "clients.plugin"),
                *("-p", "no:cacheprovider", "-p", "no:logging"),
                *("-c", os.devnull, f"--rootdir={root}"),
                *("-W", "ignore", "--continue-on-collection-errors"),
                *tests,
            ],
            # Keras' folder has modules that are named as Python's own.
            cwd=folder,
            env=_environment(path, backend, strategy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = (path / "outcomes").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        found[line["test"]] = (line["outcome"], line["error"])
    return found, found.pop("", None) is not None, done.stdout


def _environment(folder, backend, strategy):
    result = {
        **os.environ,
        "CLIENTS_KNOWN": str(folder / "known"),
        "CLIENTS_OUTCOMES": str(folder / "outcomes"),
        "CLIENTS_STRATEGY": strategy,
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": xla_flags(),
    }
    result.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    if strategy != PLAIN:
        result["KERAS_DIST_VIRTUAL_DEVICES"] = "2"
    return result
