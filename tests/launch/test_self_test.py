"""`keras-dist test` tries all that works here, and survives what fails."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import keras
import numpy as np
import pytest

from keras_dist.cli import child
from keras_dist.cli import info as report
from keras_dist.cli import self_test as command
from keras_dist.cli.jobs import digits
from keras_dist.cli.jobs import self_test
from keras_dist.cli.trial import OWN_MODEL
from keras_dist.cli.trial import RowPlace
from keras_dist.cli.trial import Settings
from keras_dist.cli.trial import rows_for
from keras_dist.environment.packages import InstalledBackend
from keras_dist.errors import DeviceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.errors import see_section

pytestmark = pytest.mark.runs_on("torch")

BACKEND = keras.backend.backend()

# Stands in for a backend's process: says what it sees, and fails as told.
FAKE = """
import json, os, sys, time
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"start {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\\n")
replies = os.fdopen(int(sys.argv[1]), "w")
def say(content):
    replies.write(json.dumps(content) + "\\n")
    replies.flush()
if os.environ["FAKE"] == "does not start":
    raise ImportError("a library is missing")
accelerators = ["gpu:0", "gpu:1"] if os.environ["FAKE"] == "gpus" else []
count = int(os.environ["KERAS_DIST_VIRTUAL_DEVICES"])
say({
    "devices": [*accelerators, *(f"cpu:{i}" for i in range(count))],
    "shards_optimizer": True,
    "shards_variables": True,
    "cluster": {"reason": "alone"},
})
for line in sys.stdin:
    asked = json.loads(line)
    kind = asked["arguments"].get("kind")
    if os.environ["FAKE"] == "fails" and kind == "mirrored":
        print("about to abort", flush=True)
        os.abort()
    elif os.environ["FAKE"] == "fails" and kind == "central":
        print("waiting", flush=True)
        time.sleep(1000)
    elif os.environ["FAKE"] == "fails" and kind == "sharded":
        say({"status": "failed", "details": "weights differ", "fix": "mend"})
    else:
        say({"status": "passed", "details": "fine"})
"""


def backend(name, installed=True):
    return InstalledBackend(name, f"{name}:Backend", installed)


@pytest.fixture
def fake(invoke, monkeypatch, tmp_path):
    """Runs the command on backends whose processes are fakes."""
    (tmp_path / "fake_child.py").write_text(FAKE)
    log = tmp_path / "log"
    monkeypatch.setattr(child, "MODULE", "fake_child")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    known = [backend("absent", installed=False), backend("there")]
    monkeypatch.setattr(command, "backends", lambda: known)

    def run(kind, *arguments):
        monkeypatch.setenv("FAKE", kind)
        path = tmp_path / "results.json"
        outcome = invoke(" ".join(["test --json", str(path), *arguments]))
        results = json.loads(path.read_text()) if path.exists() else None
        starts = log.read_text().splitlines() if log.exists() else []
        return outcome, results, starts

    return run


def by_name(results):
    return {
        each["name"].partition(",")[0]: each
        for each in results["results"]
        if each["backend"] != "absent"
    }


def run_really(folder, *options):
    """The command's process, and what it writes."""
    process = subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "test"]
        + ["--backend", BACKEND, "--devices", "2", "--timeout", "240"]
        + ["--json", "results.json", *options],
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return process, json.loads((folder / "results.json").read_text())


def test_where_a_users_model_differs_it_says_what_and_ends_with_1(tmp_path):
    (tmp_path / "mine.py").write_text(SPOILED)
    process, found = run_really(tmp_path, "--model", "mine:loss")
    results = by_name(found)
    assert process.returncode == 1, process.stdout + process.stderr
    assert results["one device"]["status"] == "passed"
    assert results["one device"]["details"].startswith("same: ")
    assert results["one device"]["report"]["same"] is True
    for name in ("mirrored", "central storage"):
        assert results[name]["status"] == "failed"
        first = results[name]["report"]["first"]
        assert (first["kind"], first["name"]) == ("loss", "loss")
    printed = " ".join(process.stdout.split())
    assert see_section("The numbers differ") in printed


def test_all_that_this_backend_has_passes(tmp_path):
    process, found = run_really(tmp_path, "--workers", "2")
    assert process.returncode == 0, process.stdout + process.stderr
    assert found["failed"] == 0
    results = by_name(found)
    passed = {n for n, each in results.items() if each["status"] == "passed"}
    assert passed >= {
        "one device",
        "mirrored",
        "central storage",
        "run",
        "2 workers",
    }
    for name in set(results) - passed:
        assert results[name]["details"] and results[name]["fix"]
    assert found["versions"][BACKEND] == version(BACKEND)
    assert found["backends"][BACKEND]["backend"] == BACKEND
    for each in found["results"]:
        assert each["status"] in process.stdout
    assert f"{found['passed']} passed, 0 failed" in process.stdout
    # A bar is for terminals.
    assert "━" not in process.stdout
    assert not process.stderr


def test_a_crash_a_hang_and_wrong_numbers_are_a_rows_failure(fake, monkeypatch):
    ask = child.Child.ask

    def patient(self, job, arguments, limit):
        hangs = arguments.get("kind") == "central"
        return ask(self, job, arguments, 2 if hangs else limit)

    monkeypatch.setattr(child.Child, "ask", patient)
    outcome, found, starts = fake(
        "fails", "--timeout", "200", "--devices", "2", "--workers", "2"
    )
    assert outcome.exit_code == 1, outcome.output
    results = by_name(found)
    crash = results["mirrored"]
    assert crash["status"] == "failed"
    assert "SIGABRT" in crash["details"]
    assert "about to abort" in crash["last_lines"]
    hang = results["central storage"]
    assert hang["status"] == "failed"
    assert hang["details"].startswith("no answer within 2 s")
    assert "--timeout" in hang["fix"]
    wrong = results["sharded optimizer"]
    assert (wrong["details"], wrong["fix"]) == ("weights differ", "mend")
    assert results["one device"]["status"] == "passed"
    # The first one, and one after the crash and after the hang.
    assert len(starts) == 3
    assert (found["passed"], found["failed"]) == (4, 3)
    assert "4 passed, 3 failed, 2 skipped" in outcome.output


def test_a_backend_that_does_not_start_fails_with_its_last_line(fake):
    outcome, found, _ = fake("does not start")
    assert outcome.exit_code == 1
    (result,) = by_name(found).values()
    assert "ImportError: a library is missing" in result["details"]
    assert "pip install --force-reinstall 'keras-dist[there]'" in result["fix"]


def test_one_that_is_not_installed_is_skipped_with_its_extra(fake):
    outcome, found, starts = fake("works")
    assert outcome.exit_code == 0, outcome.output
    skipped = found["results"][0]
    assert (skipped["backend"], skipped["status"]) == ("absent", "skipped")
    assert skipped["fix"] == "pip install 'keras-dist[absent]'"
    assert len(starts) == 1
    assert found["problem"] == "" and "Problem" not in outcome.output


@pytest.mark.parametrize(
    ("kind", "picked", "line", "problem"),
    [
        (
            *("works", "other", ""),
            "keras_dist has no backend 'other'. Set KERAS_BACKEND to one of "
            "absent, there.",
        ),
        (
            *("works", "absent", ""),
            "absent: not installed. Try: pip install 'keras-dist[absent]', or "
            "KERAS_BACKEND=there",
        ),
        ("does not start", "there", "", "there: can't be used, its process"),
        # An option is before the variable.
        ("works", "absent", "--backend there", ""),
    ],
)
def test_a_backend_that_keras_can_not_have_is_a_problem(
    fake, invoke, monkeypatch, kind, picked, line, problem
):
    monkeypatch.setenv("KERAS_BACKEND", picked)
    outcome, found, starts = fake(kind, line)
    assert outcome.exit_code == bool(problem), outcome.output
    shown = f"Problem: {problem}" in " ".join(outcome.output.split())
    assert shown is bool(problem)
    assert found["problem"].startswith(problem)
    assert bool(found["problem"]) is bool(problem)
    # What works is tried all the same.
    assert len(starts) == 1
    assert found["failed"] == (kind == "does not start")
    if picked == "other":  # `keras-dist info` tells the same
        known = [backend("absent", installed=False), backend("there")]
        monkeypatch.setattr(report, "backends", lambda: known)
        told = f"Problem: {problem}"
        assert told in invoke("info").output
        assert report.gather(60.0)["picked"]["problem"] == found["problem"]


def test_accelerators_have_a_process_of_their_own(fake):
    outcome, found, starts = fake("gpus", "--workers", "2")
    assert outcome.exit_code == 0, outcome.output
    names = [each["name"] for each in found["results"][1:]]
    assert "mirrored, gpu:0-1" in names
    assert "2 workers, all accelerators" in names
    assert starts == ["start ", "start -1"]


@pytest.mark.parametrize(
    ("devices", "shards", "settings", "tried"),
    [
        (
            *(["cpu:0"], False, Settings(0, 3)),
            "one device, cpu:0; mirrored, cpu:0-1; mirrored, cpu:0-2; "
            "central storage, cpu:0-1; run, reduce, gather",
        ),
        (
            *(["cpu:0"], False, Settings(0, 1)),
            "one device, cpu:0; central storage, cpu:0; run, reduce, gather",
        ),
        (
            *(["cpu:0", "gpu:0", "gpu:1"], True),
            Settings(workers=2, devices=2, model="mine:make"),
            "one device, cpu:0; mirrored, cpu:0-1; central storage, cpu:0-1; "
            "sharded optimizer, cpu:0-1; sharded variables, cpu:0-1; "
            "mirrored, gpu:0-1; 2 workers",
        ),
    ],
)
def test_what_is_tried(devices, shards, settings, tried):
    seen = {
        "devices": devices,
        "shards_optimizer": shards,
        "shards_variables": shards,
    }
    rows = rows_for(backend("there"), seen, settings)
    jobs = {"run, reduce, gather": "collectives", "2 workers": "verify workers"}
    assert {row.name: row.job for row in rows if row.job} == {
        name: jobs.get(name, "verify") for name in tried.split("; ")
    }
    for row in rows:
        on_gpus = row.place is RowPlace.ACCELERATORS
        assert on_gpus is ("gpu" in row.name)
        assert row.job or (row.reason and row.fix)
        models = {row.arguments.get("model", settings.model)}
        assert models == {settings.model}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--backend other", "no backend 'other'. It has: absent, there"),
        ("--backend absent", "pip install 'keras-dist[absent]'"),
        ("--workers 1", "Expected: 2 or more"),
        ("", "pip install 'keras-dist[absent]'"),
    ],
)
def test_what_can_not_run_ends_with_2(fake, monkeypatch, line, message):
    if not line:
        absent = backend("absent", installed=False)
        monkeypatch.setattr(command, "backends", lambda: [absent])
    outcome, _, starts = fake("works", line)
    assert outcome.exit_code == 2
    assert message in outcome.output
    assert not starts


# Each is `digits:make`, and something that `keras-dist test` must find.
SPOILED = """
import keras
import numpy as np
import keras_dist
from keras_dist.cli.jobs import digits

def nan():
    model, batches = digits.make()
    x, y = batches[1]
    return model, [batches[0], (x * np.nan, y)]

def other():
    model, batches = digits.make()
    if keras_dist.has_strategy():
        model.optimizer.momentum = 0.5
    return model, batches

def loss():
    several = keras_dist.get_strategy().num_replicas_in_sync > 1
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mae" if several else "mse")
    return model, np.eye(12, 3, dtype="float32"), np.ones((12, 1))
"""


@pytest.fixture
def spoiled(monkeypatch, tmp_path):
    (tmp_path / "spoiled.py").write_text(SPOILED)
    monkeypatch.syspath_prepend(str(tmp_path))


def verified(model):
    arguments = {"model": model, "kind": "mirrored"}
    devices = {"devices": ["cpu:0", "cpu:1"]}
    request = {"job": "verify", "arguments": arguments | devices}
    return self_test._answer(request)


def test_the_own_model_has_the_numbers_of_one_device():
    answer = verified(OWN_MODEL)
    assert answer["status"] == "passed"
    assert answer["details"].startswith("same: ")
    assert tuple(answer["report"]["batches"]) == digits.BATCHES


def test_nan_on_both_sides_fails(spoiled):
    answer = verified("spoiled:nan")
    # To `strategy.verify` they are the same, after one step without NaN.
    assert answer["report"]["same"]
    assert answer["status"] == "failed"
    assert answer["details"].startswith("not a number, which can't be compared")
    # The first step's loss is a number, and differs by rounding.
    (loss,) = [
        each
        for each in answer["report"]["differences"]
        if (each["phase"], each["kind"]) == ("training", "loss")
    ]
    assert np.isnan(loss["strategy"])


def test_what_fails_is_named(spoiled):
    answer = verified("spoiled:other")
    assert answer["status"] == "failed"
    assert answer["details"].startswith("the numbers differ: weight")
    answer = verified("spoiled:missing")
    assert answer["status"] == "failed"
    assert "the module has no attribute 'missing'" in answer["details"]
    assert answer["fix"] == "do what the message says"


def test_made_up_digits_do_as_well(monkeypatch):
    real = digits.data()
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda module: None)
    for (x, y), (made, classes) in zip(real, digits.data(), strict=True):
        assert made.shape == x.shape and classes.shape == y.shape
        assert made.dtype == classes.dtype == y.dtype == np.float32
        assert classes.max() < digits.NUM_CLASSES


def test_collectives_that_are_wrong_are_found(monkeypatch):
    devices = ["cpu:0", "cpu:1"]
    assert "gather" in self_test.check_collectives(devices)
    monkeypatch.setattr(
        self_test.MirroredStrategy,
        "reduce",
        lambda self, op, value, axis: np.float32(17.0),
    )
    with pytest.raises(AssertionError, match="`reduce SUM` gave"):
        self_test.check_collectives(devices)


@pytest.mark.parametrize(
    ("error", "kind", "status", "fix"),
    [
        (TimeoutError("not done"), "sharded", "failed", "--timeout"),
        (DeviceError("choose another"), "one", "failed", "the message says"),
        (AssertionError("a bug"), "one", "failed", "report it"),
        (UnsupportedModelError("no LAMB"), "sharded", "skipped", "leave it"),
        (UnsupportedModelError("no LAMB"), "one", "failed", "the message says"),
    ],
)
def test_an_error_says_what_to_do(monkeypatch, error, kind, status, fix):
    def fail(**arguments):
        raise error

    monkeypatch.setitem(self_test._JOBS, "verify", fail)
    arguments = {"model": "mine:make", "kind": kind}
    answer = self_test._answer({"job": "verify", "arguments": arguments})
    assert answer["status"] == status
    assert fix in answer["fix"]
    assert str(error) in answer["details"]
