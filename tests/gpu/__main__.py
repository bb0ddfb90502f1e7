"""The command that checks one real GPU, and writes what it measured.

Run it in `tests/`, with any Python that has Keras, pytest and a framework:

    python -m gpu --json gpu.json --markdown gpu.md

It needs a source tree and no installed keras_dist. What follows `--` goes to
pytest, such as `-k central`. `--rehearse` tries the checks on CPU devices.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from importlib.util import find_spec

from gpu import machine
from gpu import report
from gpu import sources
from gpu.lines import VARIABLE
from gpu.lines import read

HERE = pathlib.Path(__file__).parent
BACKENDS = ("jax", "torch", "tensorflow")
# Statuses of pytest: all passed, and nothing was chosen.
FINE = (0, 5)


def main():
    """Returns the exit status: 1 if a check failed, on any backend."""
    options = _options()
    found, statuses = {}, {}
    with tempfile.TemporaryDirectory(prefix="keras-dist-gpu-") as name:
        folder = pathlib.Path(name)
        metadata = folder / "metadata"
        metadata.mkdir()
        environment = sources.environment(metadata)
        for backend in options.backend or _installed():
            lines = folder / f"{backend}.jsonl"
            statuses[backend] = _run(backend, lines, environment, options)
            found[backend] = read(lines)
    content = report.content(machine.described(), found, options.rehearse)
    options.json.write_text(json.dumps(content, indent=2) + "\n")
    text = report.markdown(content)
    options.markdown.write_text(text)
    print(text)
    for backend, status in statuses.items():
        if status not in FINE:
            print(f"{backend}: pytest ended with status {status}.")
    return int(any(status not in FINE for status in statuses.values()))


def _run(backend, lines, environment, options):
    """Returns the exit status of pytest on one backend."""
    return subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest", "-q", "--tb=short"),
            *("-c", str(HERE / "pytest.ini"), "--confcutdir", str(HERE)),
            *(*options.pytest, str(HERE)),
        ],
        env={
            **environment,
            "KERAS_BACKEND": backend,
            VARIABLE: str(lines),
            "GPU_REHEARSAL": str(int(options.rehearse)),
        },
        check=False,
    ).returncode


def _installed():
    return [backend for backend in BACKENDS if find_spec(backend)]


def _options():
    parser = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=BACKENDS,
        help="may be given more than once; all that are installed by default",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="use CPU devices; what only a GPU can show is left out",
    )
    parser.add_argument("--json", type=pathlib.Path, default="gpu.json")
    parser.add_argument("--markdown", type=pathlib.Path, default="gpu.md")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
