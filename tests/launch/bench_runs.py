"""Runs `keras-dist bench` as people do, once for the tests of a file."""

import json
import os
import subprocess
import sys

import keras

from keras_dist.bench.benchmarks import Benchmarks

BACKEND = keras.backend.backend()


class OnlyLoops(Benchmarks):
    """Benchmarks that have what they must, and count nothing."""

    loop_text = fits_text = "by hand."

    def native_loop(self, setting):
        raise NotImplementedError

    def native_fits(self, task, devices):
        return {}


class Run:
    """A command that has ended, and the files that it wrote."""

    def __init__(self, folder, *arguments):
        self.picture = folder / "bench.png"
        path = folder / "bench.json"
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "KERAS_DIST_VIRTUAL_DEVICES"
        }
        self.process = subprocess.run(
            [
                *(sys.executable, "-m", "keras_dist.cli", "bench", *arguments),
                *("--json", str(path), "--plot", str(self.picture)),
                *("--backend", BACKEND),
            ],
            env=inherited | {"COLUMNS": "80", "KERAS_BACKEND": ""},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert self.process.returncode == 0, (
            self.process.stdout + self.process.stderr
        )
        self.content = json.loads(path.read_text())
        # What workers' frameworks print is passed on.
        self.lines = [
            line
            for line in self.process.stdout.splitlines()
            if not line.startswith("[worker ")
        ]
        self.text = " ".join(" ".join(self.lines).split())

    def check(self, command, *said):
        """What holds of each command.

        Args:
            command: String, its name.
            *said: Strings that are in what it shows.
        """
        assert self.content["command"] == f"bench {command}"
        assert self.content["backend"] == BACKEND
        assert self.content["versions"]["keras"] == keras.__version__
        assert f"{os.cpu_count()} CPU cores" in self.content["machine"]
        assert self.content["machine"] in self.text
        for part in (f"keras {keras.__version__}", *said):
            assert part in self.text
        assert "Measuring" in self.process.stderr
        assert "Measuring" not in self.text
        # Numbers are whole on a narrow terminal.
        for each in self.content.get("settings", ()):
            for number in each["counts"].get("live_bytes", {}).values():
                assert f"{number / 1e6:.2f}" in self.text.split()
        # It fits a terminal, and shows no bar where there is none.
        assert all(len(x) <= 80 for x in self.lines if x[:1] != "|")
        assert "\x1b" not in self.process.stdout + self.process.stderr
        assert "━" not in self.process.stderr
        assert self.picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def compared(run):
    """The summary's rows: (model, N, pair, ratio, noise, verdict)."""
    rows = []
    for each in run.content["settings"]:
        noise = each["noise"]["median"]
        for row in each["comparisons"]:
            rows.append(
                (
                    each["model"],
                    str(each["replicas"]),
                    row["name"],
                    f"{row['ratio']['median']:.2f}",
                    f"{noise:.2f}",
                    row["verdict"],
                )
            )
    return rows


def shown(run):
    """The same rows as the table has them, without quartiles."""
    rows = []
    for line in run.lines:
        words = line.replace("|", " ").split()
        if len(words) >= 8 and "/" in words[2]:
            model, n, pair, ratio, _, noise, _, *verdict = words
            rows.append((model, n, pair, ratio, noise, " ".join(verdict)))
    return rows
