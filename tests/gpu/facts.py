"""A pytest plugin that writes outcomes and what the checks measured.

Each line of the file is JSON, written as it is known: a process that dies
leaves what came before.
"""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version

import keras
import pytest

from gpu import lines
from gpu import places

PACKAGES = (
    "keras",
    "keras-dist",
    "numpy",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "torch",
    "tensorflow",
)


class Facts:
    """What one run of pytest found out.

    Args:
        path: `pathlib.Path` of the file to write, or `None`.
    """

    def __init__(self, path):
        self._path = path
        self.left_out = []

    def write(self, **line):
        """Writes a line, if there is a file."""
        if self._path is not None:
            lines.append(self._path, line)

    def measured(self, name, value, unit=""):
        """Notes a number for the report, such as a ratio or bytes."""
        self.write(kind="fact", name=name, value=value, unit=unit)

    def is_shown(self, name, because):
        """Returns whether this machine can show something.

        A rehearsal can't, and notes what was left out and why.
        """
        if not places.IS_REHEARSAL:
            return True
        self.left_out.append((name, because))
        self.write(kind="left out", name=name, because=because)
        return False

    def pytest_sessionstart(self):
        self.write(
            kind="session",
            backend=keras.backend.backend(),
            python=platform.python_version(),
            versions=_versions() | _cuda(),
            devices=places.num_devices(),
            is_rehearsal=places.IS_REHEARSAL,
        )

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.write(
                kind="outcome",
                test=report.nodeid.rpartition("/")[2],
                outcome=report.outcome,
                seconds=round(report.duration, 3),
                text=_text(report),
            )

    def pytest_terminal_summary(self, terminalreporter):
        for name, because in dict.fromkeys(self.left_out):
            terminalreporter.write_line(f"LEFT OUT {name}: {because}")


def _text(report):
    if report.outcome == "skipped":
        return report.longrepr[2].removeprefix("Skipped: ")
    if report.outcome == "failed":
        return str(report.longrepr)[-2000:]
    return ""


def _versions():
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cuda():
    """Returns the version of CUDA that PyTorch was built for, if any."""
    if keras.backend.backend() != "torch":
        return {}
    import torch

    return {"CUDA of torch": torch.version.cuda or "none"}


@pytest.fixture
def facts(request):
    """The `Facts` of this run."""
    return request.config.stash[KEY]


KEY = pytest.StashKey()
