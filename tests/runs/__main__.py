"""Runs all tests, each run as if one framework alone were installed.

Run it in `tests/`, for all runs, or for those whose names begin so:

    python -m runs jax torch-programs

With `--full` every backend runs what CI gives to one of them, and TensorFlow
runs the contract's tests on tf.distribute itself.
"""

import os
import sys
import time

from runs import runs
from runs.pool import run_all


def main(names):
    """Returns the exit status: 1 unless every run passes."""
    is_full = "--full" in names
    names = [name for name in names if name != "--full"]
    os.environ |= runs.FULL if is_full else runs.DIVIDED
    known = [run.name for run in runs.RUNS]
    for name in names:
        if not any(each.startswith(name) for each in known):
            sys.exit(f"No run's name begins with {name!r}. Expected: {known}.")
    chosen = [
        run
        for run in runs.RUNS
        if not names or run.name.startswith(tuple(names))
    ]
    start = time.monotonic()
    # One more than there are cores, as some tests wait.
    ended = run_all(chosen, 1 + (os.cpu_count() or 1))
    width = max(len(end.run.name) for end in ended)
    for end in ended:
        print(f"{end.run.name:{width}}  {end.seconds:6.0f} s  {end.summary}")
    print(f"In all {(time.monotonic() - start) / 60:.1f} minutes.")
    return int(any(end.status for end in ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
