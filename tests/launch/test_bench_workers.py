"""`keras-dist bench workers`: what it starts, counts and shows."""

import os
import re
import socket
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from keras_dist.bench.loops import MODELS
from keras_dist.bench.loops import Setting
from keras_dist.bench.measure import Measurement
from keras_dist.bench.measure import bytes_sent
from keras_dist.bench.measure import pairs_of
from keras_dist.bench.report import Output
from keras_dist.bench.workers import report_of_workers
from keras_dist.bench.workers import run_workers
from keras_dist.cli.main import app
from keras_dist.errors import BackendNotFoundError
from keras_dist.errors import DeviceError
from keras_versions import RESETS_METRICS
from launch.bench_runs import BACKEND
from launch.bench_runs import OnlyLoops
from launch.bench_runs import Run
from launch.bench_runs import compared
from launch.bench_runs import shown

pytestmark = pytest.mark.runs_on("torch")

TWO = Setting(MODELS["small"], ("cpu:0",) * 2)
GRADIENT_BYTES = 4 * (64 * 32 + 32 + 32 * 10 + 10)

# What TensorFlow does not tell.
COLLECTIVES = {
    # The loss travels with the gradients.
    "torch": {
        "native": 1,
        "ours": 1,
        "again": 1,
        "run": 1,
        "fit": 1,
        "DDP": 1,
        "Keras": 0,
    },
    # Native: two metric variables are set to zero, each after a comparison.
    "jax": {
        "native": 3 if RESETS_METRICS else 1,
        "ours": 1,
        "again": 3 if RESETS_METRICS else 1,
        "run": 1,
        "fit": 1,
        "jit": 1,
        "Keras": 0,
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Run(
        tmp_path_factory.mktemp("bench"),
        *("workers", "--models", "small", "--rounds", "2", "--block-ms", "1"),
    )


def test_the_table_has_a_row_for_each_comparison(finished):
    expected = ["ours/native", "run/native", "ours/run"]
    expected += ["fit/native", "ours/fit"]
    for other in {"jax": ["jit"], "torch": ["DDP"]}.get(BACKEND, []):
        expected += [f"{other}/native", f"ours/{other}"]
    rows = shown(finished)
    assert rows == compared(finished)
    assert {row[:2] for row in rows} == {("small", "2")}
    expected += ["Keras/native", "ours/Keras"]
    assert [row[2] for row in rows] == expected


def test_it_says_what_was_measured(finished):
    finished.check(
        "workers",
        f"Native: {finished.content['native']}",
        "in the minute before; the workers add theirs",
        "A/A is the arm 'native' against a copy of itself",
    )
    assert "Measuring small, 2 workers" in finished.process.stderr
    assert len(finished.content["load"]) == 3


def test_the_file_has_all_numbers(finished):
    (found,) = finished.content["settings"]
    assert (found["model"], found["replicas"], found["rows"]) == (
        "small",
        2,
        64,
    )
    times = found["times"]
    assert {"native", "ours", "again", "run", "fit", "Keras"} <= set(times)
    assert all(len(seen) == 2 for seen in times.values())
    first, *_ = found["comparisons"]
    paired = np.divide(
        times["ours"], np.mean([times["native"], times["again"]], 0)
    )
    assert first["name"] == "ours/native"
    assert first["ratio"]["median"] == pytest.approx(np.median(paired))


def test_what_meets_has_the_same_loss(finished):
    losses = dict(finished.content["settings"][0]["losses"])
    # Each worker by itself learns from other rows.
    del losses["Keras"]
    # The mean over the steps, not the last one's.
    del losses["fit"]
    for loss in losses.values():
        assert loss == pytest.approx(losses["native"], rel=1e-3)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="Only Linux tells how much a socket has sent.",
)
def test_bytes_of_a_step_are_those_of_the_gradients(finished):
    counts = finished.content["settings"][0]["counts"]
    assert counts["least_bytes"]["ours"] == GRADIENT_BYTES
    for arm, sent in counts["bytes_sent"].items():
        if arm == "Keras":
            assert sent < 500
        else:
            assert GRADIENT_BYTES <= sent < 1.5 * GRADIENT_BYTES


def test_collectives_of_a_step(finished):
    counts = finished.content["settings"][0]["counts"]["collectives"]
    assert counts == COLLECTIVES.get(BACKEND, dict.fromkeys(counts))


def test_each_worker_trains_on_rows_of_its_own():
    batches = TWO.batches()
    for place, (x, y) in enumerate(batches):
        for whole, axis in ((x, 0), (y, 1)):
            own = [TWO.rows_of(worker)[place][axis] for worker in (0, 1)]
            np.testing.assert_array_equal(np.concatenate(own), whole)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="Only Linux tells how much a socket has sent.",
)
def test_bytes_that_were_sent_are_counted():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as other,
    ):
        before, files = bytes_sent(), os.listdir("/proc/self/fd")
        client.sendall(bytes(70_000))
        # Until all is there, all has been sent.
        other.recv(70_000, socket.MSG_WAITALL)
        assert bytes_sent() - before >= 70_000
        assert os.listdir("/proc/self/fd") == files


def test_bytes_are_unknown_on_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "plan9")
    assert bytes_sent() is None


def test_what_is_unknown_is_said_to_be(capsys):
    times = {name: [0.001] for name in ("native", "ours", "again", "Keras")}
    traffic = {
        "collectives": dict.fromkeys(times),
        "bytes_sent": dict.fromkeys(times, 2500.0),
        "least_bytes": dict.fromkeys(times, 0.0) | {"ours": GRADIENT_BYTES},
    }
    measured = Measurement(TWO, 10, times, {}, traffic, pairs_of(times))
    Output().publish(report_of_workers([measured], "by hand.", None))
    text = capsys.readouterr().out
    assert re.search(r"ours +1.000 +not counted +2.5 +9.6", text)
    assert re.search(r"Keras +1.000 +not counted +2.5 +0.0", text)
    assert not re.search(r" again +1.000", text)
    assert "Load" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "1"), "--workers"),
        (("--models", ","), "at least one of small, medium"),
        (("--rounds", "0"), "--rounds"),
        (("--backend", "nosuch"), "'nosuch'"),
        (("--json", "no/such/folder/file.json"), "folder"),
    ],
)
def test_a_bad_option_is_an_error_that_says_so(arguments, message):
    result = CliRunner().invoke(app, ["bench", "workers", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("workers", "sizes", "message"),
    [(2, ["small", "huge"], "'huge'"), (3, ["small"], "equal shares.*N = 3")],
)
def test_models_that_cannot_be_measured_are_errors(workers, sizes, message):
    with pytest.raises(ValueError, match=message):
        run_workers(workers, sizes, "cpu", 1, 0.001, Output())


def test_workers_without_a_gpu_for_each_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceError, match="2 workers, and 1 GPUs"):
        run_workers(2, ["small"], "gpu", 1, 0.001, Output())


def test_gpus_that_the_framework_does_not_see_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "98,99")
    with pytest.raises(DeviceError, match="Received: cpu:0.* 'gpu:0'"):
        run_workers(2, ["small"], "gpu", 1, 0.001, Output())


def test_each_worker_sees_one_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    seen = {}

    def launch(fn, args, workers, devices):
        (setting,), *_ = args
        seen.update(devices=devices, named=setting.devices)
        seen["shares"] = os.environ["CUDA_VISIBLE_DEVICES"]
        raise KeyboardInterrupt

    monkeypatch.setattr("keras_dist.bench.workers.launch", launch)
    with pytest.raises(KeyboardInterrupt):
        run_workers(2, ["small"], "gpu", 1, 0.001, Output())
    assert seen == {
        "devices": None,
        "named": ("gpu:0", "gpu:0"),
        "shares": "4,5",
    }


@pytest.mark.parametrize("found", [[], [OnlyLoops]])
def test_a_backend_without_its_own_distribution_is_an_error(
    registered_benchmarks, found
):
    registered_benchmarks(*found)
    with pytest.raises(BackendNotFoundError, match="no distribution over"):
        run_workers(2, ["small"], "cpu", 1, 0.001, Output())
