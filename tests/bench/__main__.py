"""The command that compares keras_dist with the frameworks' own loops.

Run it in `tests/`, with any Python that has Keras and a framework:

    python -m bench fit --backend jax

It needs a source tree and no installed keras_dist.
"""

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from gpu import sources

BACKENDS = ("jax", "tensorflow", "torch")
# Seconds of a block, if there is no --block-ms.
BLOCK_MS = {"fit": 150, "loops": 100, "workers": 200}
# It says that this process has the backend and the metadata.
VARIABLE = "BENCH_STARTED"


def main():
    options = _options()
    if VARIABLE in os.environ:
        benchmark = importlib.import_module(f"bench.{options.command}")
        content = benchmark.run(options)
        if options.json is not None:
            options.json.write_text(json.dumps(content, indent=2) + "\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="keras-dist-bench-") as folder:
        environment = sources.environment(pathlib.Path(folder))
        # The benchmarks set the number of devices themselves.
        environment.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
        environment |= {"KERAS_BACKEND": options.backend, VARIABLE: "1"}
        if getattr(options, "device", "cpu") == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "-1"}
            environment |= {"JAX_PLATFORMS": "cpu"}
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        command = [sys.executable, "-P", "-m", "bench", *sys.argv[1:]]
        return subprocess.run(command, env=environment).returncode


def _options():
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("fit", "fit, and the framework's own training of a Keras model"),
        ("loops", "the portable loop, and the framework's own"),
        ("workers", "training over processes, and the framework's own"),
        ("memory", "bytes on devices under each strategy, and planned ones"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("--backend", choices=BACKENDS, required=True)
        command.add_argument("--json", type=pathlib.Path)
        if name == "memory":
            command.add_argument("--devices", type=int, default=4)
            command.add_argument("--params", type=float, default=2e7)
            continue
        if name == "workers":
            command.add_argument("--workers", type=int, default=2)
        else:
            command.add_argument("--replicas", type=_numbers, default=[1, 2])
        command.add_argument("--models", type=_names, default="small,medium")
        command.add_argument("--rounds", type=int, default=15)
        command.add_argument("--block-ms", type=int, default=BLOCK_MS[name])
        command.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    return parser.parse_args()


def _names(text):
    return text.split(",")


def _numbers(text):
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
