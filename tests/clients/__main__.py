"""The command that runs Keras' own tests in scopes and prints a table.

Run it in `tests/`:

    python -m clients --backend torch --strategy mirrored trainers optimizers
"""

import argparse
import os
import sys

from clients.comparison import compare
from clients.report import failures
from clients.report import table
from clients.strategies import STRATEGIES

FOLDERS = (
    "optimizers",
    "trainers",
    "metrics",
    "callbacks",
    "models",
    "saving",
    "layers",
)


def main():
    """Returns the exit status: 1 if a test fails that is not on the list."""
    options = _options()
    strategies = options.strategy or STRATEGIES[options.backend]
    results = []
    for strategy in strategies:
        for tests in options.tests:
            done = compare([tests], options.backend, strategy, _say)
            results.append((tests, done))
            print(failures(done), end="", flush=True)
            _say(f"{strategy}, {tests}: {len(done.passed)} passed")
    print(table(results))
    return int(not all(done.is_good for _, done in results))


def _say(text):
    print(text, file=sys.stderr, flush=True)


def _options():
    parser = argparse.ArgumentParser(
        prog="python -m clients", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--backend",
        choices=sorted(STRATEGIES),
        default=os.environ.get("KERAS_BACKEND"),
        required="KERAS_BACKEND" not in os.environ,
    )
    parser.add_argument(
        "--strategy",
        action="append",
        choices=STRATEGIES["jax"],
        help="may be given more than once; all by default",
    )
    parser.add_argument(
        "tests",
        nargs="*",
        default=list(FOLDERS),
        help="folders, files or tests of keras/src",
    )
    options = parser.parse_args()
    for strategy in options.strategy or ():
        if strategy not in STRATEGIES[options.backend]:
            parser.error(f"{options.backend} has no strategy '{strategy}'.")
    return options


if __name__ == "__main__":
    sys.exit(main())
