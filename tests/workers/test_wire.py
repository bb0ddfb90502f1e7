"""In a step, workers send the bytes that an all-reduce has to, and no more."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from parity.harness import BACKEND
from sharded.helpers import SHARDS
from sharded.helpers import shards
from workers.wire_jobs import STEPS

TESTS = pathlib.Path(__file__).parent.parent


def _can_isolate():
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "true"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


pytestmark = pytest.mark.skipif(
    not _can_isolate(),
    reason="Other programs' bytes can't be kept out: this system makes no "
    "network namespaces for users.",
)


@functools.cache
def _found(workers, dtype):
    """What `bytes_a_step` gives, by the optimizer's state."""
    states = ["mirrored", "sharded"] if SHARDS and not dtype else ["mirrored"]
    command = ["unshare", "--map-root-user", "--net", sys.executable]
    command += ["-m", "workers.wire_jobs", str(workers), dtype, *states]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ['PYTHONPATH']}",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(states, found, strict=True))


def bytes_a_step(workers, dtype="", state="mirrored"):
    """Gradient bytes of a model, and all bytes on the wire in one step."""
    return _found(workers, dtype)[state]


WORKERS = pytest.mark.parametrize(
    "workers",
    [
        pytest.param(2, marks=pytest.mark.runs_on("torch")),
        pytest.param(3, marks=pytest.mark.nightly),
    ],
)


@WORKERS
def test_a_step_sends_what_an_all_reduce_has_to(workers):
    gradients, wire = bytes_a_step(workers)
    # Each worker sends 2 (n - 1) / n of the gradients.
    assert wire <= 1.02 * 2 * (workers - 1) * gradients
    assert wire >= 2 * (workers - 1) * gradients


@shards
@WORKERS
def test_a_sharded_state_sends_as_much(workers):
    gradients, wire = bytes_a_step(workers, state="sharded")
    # Between CPUs, XLA sums gradients everywhere, and gathers what is new.
    limit = 1.55 if BACKEND == "jax" else 1.02
    # Gradients to whom they belong, and parameters back.
    assert wire <= limit * 2 * (workers - 1) * gradients
    assert wire >= 2 * (workers - 1) * gradients


@pytest.mark.skipif(
    BACKEND == "jax", reason="On JAX the compiler chooses what travels."
)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float16", marks=pytest.mark.runs_on()),
        pytest.param("bfloat16", marks=pytest.mark.runs_on("torch")),
    ],
)
def test_half_the_bytes(dtype):
    gradients, wire = bytes_a_step(2, dtype)
    # A sum that was expected after the last step comes to nothing: the losses
    # travel between these sums, so no worker knows which one is the last.
    assert gradients <= wire <= (1.02 + 1 / STEPS) * gradients
