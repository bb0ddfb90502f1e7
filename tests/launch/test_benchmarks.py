"""`python -m bench` compares with the frameworks' own loops."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import keras
import pytest

from bench import workers
from keras_versions import RESETS_METRICS

BACKEND = keras.backend.backend()
TESTS = pathlib.Path(__file__).parents[1]
GRADIENT_BYTES = 4 * (64 * 32 + 32 + 32 * 10 + 10)
LINUX = pytest.mark.skipif(
    sys.platform != "linux",
    reason="Only Linux tells how much a socket has sent.",
)

# Arms that some backends have only.
FITS = {
    "jax": {"DataParallel", "jit"},
    "tensorflow": {"Mirrored", "loop"},
    "torch": {"loop", "DDP", "processes"},
}[BACKEND]
LOOPS = {"jax": {"Keras", "shmap"}, "torch": {"Keras"}}.get(BACKEND, set())
WORKERS = {"jax": {"jit"}, "torch": {"DDP"}}.get(BACKEND, set())
# What TensorFlow does not tell. The loss travels with the gradients. On JAX,
# two metric variables are set to zero, each after a comparison.
COLLECTIVES = {"jax": 1, "torch": 1}.get(BACKEND)
NATIVE_COLLECTIVES = 3 if BACKEND == "jax" and RESETS_METRICS else COLLECTIVES


def measured(folder, *arguments):
    """What a command writes, which has measured as briefly as it can."""
    path = folder / "bench.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench", *arguments),
            *("--backend", BACKEND, "--json", str(path)),
        ],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"keras {keras.__version__}" in " ".join(done.stdout.split())
    return json.loads(path.read_text())


def setting_of(folder, *arguments):
    few = ("--models", "small", "--rounds", "2", "--block-ms", "1")
    (found,) = measured(folder, *arguments, *few)["settings"]
    assert (found["model"], len(found["devices"])) == ("small", 2)
    assert all(len(times) == 2 for times in found["times"].values())
    return found


@pytest.mark.runs_on("jax")
def test_fit(tmp_path):
    found = setting_of(tmp_path, "fit", "--replicas", "2")
    assert set(found["times"]) == {"Keras", "ours", "again", *FITS}
    names = {row["name"] for row in found["comparisons"]}
    assert names == {f"ours/{name}" for name in FITS | {"Keras"}}


@pytest.mark.runs_on("tensorflow")
def test_loops(tmp_path):
    found = setting_of(tmp_path, "loops", "--replicas", "2")
    assert set(found["times"]) == {
        *("native", "ours", "again", "scan", "ragged", "reduced"),
        *LOOPS,
    }
    assert set(found["counts"]["calls"]) == {"native", "ours"}


@pytest.mark.nightly
def test_workers(tmp_path):
    found = setting_of(tmp_path, "workers")
    others = {"native", "ours", "again", "run", "fit", *WORKERS}
    assert set(found["times"]) == others | {"Keras"}
    counts = found["counts"]
    native = dict.fromkeys(("native", "again"), NATIVE_COLLECTIVES)
    alone = None if COLLECTIVES is None else 0
    expected = dict.fromkeys(others, COLLECTIVES) | native | {"Keras": alone}
    assert counts["collectives"] == expected
    if sys.platform == "linux":
        assert counts["least_bytes"]["ours"] == GRADIENT_BYTES
        sent = counts["bytes_sent"]
        assert sent.pop("Keras") < 500
        for each in sent.values():
            assert GRADIENT_BYTES <= each < 1.5 * GRADIENT_BYTES


@pytest.mark.nightly
def test_memory(tmp_path):
    # Four layers of 32 x 32 + 32, with two slots.
    size = ("--devices", "2", "--params", "4224")
    arms = measured(tmp_path, "memory", *size)["arms"]
    kept = 3 * 4 * 4224
    # PyTorch's optimizers zero gradients before a step, not after it.
    gradients = 4 * 4224 if BACKEND == "torch" else 0
    near = pytest.approx(kept, abs=200)
    plain = arms["plain Keras"]
    assert plain["planned"] == {"cpu:0": near}
    assert plain["measured"]["cpu:0"] == pytest.approx(
        kept + gradients, abs=200
    )
    central = {"cpu:0": 0, "cpu:1": 0, "cpu:2": kept}
    for what in ("planned", "measured"):
        assert arms["mirrored"][what]["cpu:0"] == near
        assert arms["central"][what] == pytest.approx(central, abs=200)
    is_sharding = {"optimizer sharded", "variables sharded"} <= set(arms)
    assert is_sharding == (BACKEND == "jax")


@LINUX
@pytest.mark.runs_on("torch")
def test_bytes_that_were_sent_are_counted():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as other,
    ):
        before, files = workers.bytes_sent(), os.listdir("/proc/self/fd")
        client.sendall(bytes(70_000))
        # Until all is there, all has been sent.
        other.recv(70_000, socket.MSG_WAITALL)
        assert workers.bytes_sent() - before >= 70_000
        assert os.listdir("/proc/self/fd") == files
