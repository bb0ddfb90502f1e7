"""Real launchers: each starts a program, whose weights are one device's.

The folder has settings of its own, and the other tests leave it out. A
launcher that is not installed is a failure, which says what to install.
"""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "programs")]
# Only so that the launcher of keras_dist can be imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import pytest  # noqa: E402

from launchers import programs  # noqa: E402
from launchers.slurm import Slurm  # noqa: E402


@pytest.fixture(scope="session")
def one_device(tmp_path_factory):
    """Returns the weights that a backend trains without a cluster."""
    known = {}

    def weights(backend):
        if backend not in known:
            folder = tmp_path_factory.mktemp(f"{backend}_alone")
            done = programs.run(
                [sys.executable, "digits.py"], folder, KERAS_BACKEND=backend
            )
            assert "1 replicas" in done
            known[backend] = programs.weights(folder / "digits.keras")
        return known[backend]

    return weights


@pytest.fixture
def check(one_device, tmp_path):
    """Checks what two workers printed, and the model that the chief saved."""

    def check_two(output, backend):
        shown = programs.shown_weights(output)
        assert len(shown) == 2, output[-6000:]
        assert len(set(shown)) == 1, shown
        programs.check_equal(
            programs.weights(tmp_path / "digits.keras"), one_device(backend)
        )

    return check_two


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Returns a cluster of Slurm with this machine as its only node."""
    for name in ("munged", "slurmctld", "slurmd", "srun"):
        programs.require(name)
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
