"""`keras-dist bench` shows times, ratios and counts, and a verdict if sure."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.bench import fit
from keras_dist.bench import measure
from keras_dist.bench import report
from keras_dist.bench.measure import LEAST_ROUNDS
from keras_dist.bench.measure import Measurement
from keras_dist.bench.measure import Ratio
from keras_dist.bench.measure import verdict
from keras_dist.planning.estimates import ALL_SPLIT
from keras_dist.planning.estimates import SLOTS_SPLIT
from keras_dist.planning.report import Choice

BACKEND = keras.backend.backend()
QUIET = Ratio(1.0, 0.99, 1.01)

# Of the model with two inputs.
PARAMETERS = 6 * 3 + 3 + 3 + 1
TWO_INPUTS = """
import keras
import numpy as np

def two_inputs():
    print("printed by the user's function")
    left, right = keras.Input((4,), name="left"), keras.Input((2,))
    hidden = keras.layers.Concatenate()([left, right])
    hidden = keras.layers.Dense(3, "relu")(hidden)
    model = keras.Model([left, right], keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(20, n)).astype("float32") for n in (4, 2)]
    return model, x, rng.normal(size=(20, 1)).astype("float32")
"""


def test_what_it_measures_counts_and_shows(tmp_path):
    """The command, run as people do."""
    (tmp_path / "users.py").write_text(TWO_INPUTS)
    inherited = dict(os.environ)
    inherited.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keras_dist.cli", "bench"),
            *("--model", "users:two_inputs", "--batch-size", "8"),
            *("--rounds", "2", "--backend", BACKEND),
            *("--json", "bench.json", "--plot", "bench.png"),
        ],
        env=inherited | {"COLUMNS": "80", "KERAS_BACKEND": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["command"] == "bench"
    assert content["backend"] == BACKEND
    assert content["versions"]["keras"] == keras.__version__
    assert (content["model"], content["rows"]) == ("users:two_inputs", 8)
    # Two virtual devices, unless the user says it.
    assert content["devices"] == ["cpu:0", "cpu:1"]
    times = content["times"]
    assert set(times) == {"Keras", "mirrored", "again"}
    assert all(len(each) == 2 for each in times.values())
    (row,) = content["comparisons"]
    assert (row["name"], row["verdict"]) == ("mirrored/Keras", "few rounds")
    base = np.mean([times["Keras"], times["again"]], 0)
    median = np.median(np.divide(times["mirrored"], base))
    assert row["ratio"]["median"] == pytest.approx(median)
    noise = np.median(np.divide(times["again"], times["Keras"]))
    assert content["noise"]["median"] == pytest.approx(noise)
    losses = content["losses"]
    assert losses == pytest.approx(dict.fromkeys(times, losses["Keras"]), 1e-3)
    counts = content["counts"]
    assert set(counts["calls"]) == {"Keras", "mirrored"}
    assert all(calls > 0 for calls in counts["calls"].values())
    # Gradients, and then loss and metrics; compiled steps do not tell.
    met = 2 if BACKEND == "torch" else None
    assert counts["collectives"] == {"Keras": 0, "mirrored": met}
    # One all-reduce among two: each sends as much as there is.
    sent = {"Keras": 0, "mirrored": 2 * 4 * PARAMETERS}
    assert counts["planned_bytes"] == sent
    # Tables are whole on a narrow terminal.
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    (shown,) = (line for line in lines if "mirrored/Keras" in line)
    assert f" {row['ratio']['median']:.2f} (" in shown
    assert shown.endswith("few rounds")
    median = 1e3 * np.median(times["mirrored"])
    text = " ".join(done.stdout.split())
    assert f"mirrored {median:.3f} " in text
    assert f"{os.cpu_count()} CPU cores" in text
    assert "A/A is the arm 'Keras' against a copy of itself" in text
    assert "With fewer than 5 rounds there is no verdict" in text
    assert "Measuring users:two_inputs" in done.stderr
    # There is no bar where it can't move.
    assert "━" not in done.stderr
    picture = (tmp_path / "bench.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"


def measurement(plain, ours, again, loss=1.0):
    """A `Measurement` of times that are given."""
    times = {"Keras": plain, "mirrored": ours, "again": again}
    losses = {"Keras": 1.0, "mirrored": loss, "again": 1.001}
    pairs = [("mirrored", "Keras")]
    return Measurement(
        "m", ["cpu:0", "cpu:1"], 8, 9, times, losses, {}, pairs, "Keras"
    )


def test_ratios_are_medians_of_pairs():
    ratio = Ratio.of([2.0, 9.0, 3.0, 8.0, 5.0], [1.0, 3.0, 3.0, 2.0, 1.0])
    assert ratio == Ratio(3.0, 2.0, 4.0)
    assert str(ratio) == "3.00 (2.00-4.00)"
    # The base is the mean of both runs of plain Keras.
    measured = measurement([1.0] * 5, [2.0] * 5, [1.02] * 5)
    (row,) = measured.comparisons()
    assert row.ratio.median == pytest.approx(2 / 1.01)
    assert (row.verdict, measured.noise.median) == ("slower", 1.02)


@pytest.mark.parametrize(
    ("ratio", "noise", "rounds", "expected"),
    [
        (Ratio(1.2, 1.1, 1.3), QUIET, LEAST_ROUNDS, "slower"),
        (Ratio(0.8, 0.7, 0.9), QUIET, LEAST_ROUNDS, "faster"),
        (Ratio(1.02, 1.01, 1.03), QUIET, LEAST_ROUNDS, "level"),
        (Ratio(1.2, 0.9, 1.3), QUIET, LEAST_ROUNDS, "level"),
        (Ratio(0.9, 0.8, 1.1), QUIET, LEAST_ROUNDS, "level"),
        (Ratio(2.0, 1.9, 2.1), Ratio(1.04, 1.0, 1.05), 15, "noise"),
        (Ratio(2.0, 1.9, 2.1), Ratio(0.96, 0.95, 1.0), 15, "noise"),
        (Ratio(2.0, 1.9, 2.1), Ratio(1.0, 0.85, 1.1), 15, "noise"),
        (Ratio(2.0, 1.9, 2.1), Ratio(float("nan"), 1.0, 1.0), 15, "noise"),
        (Ratio(2.0, 1.9, 2.1), QUIET, LEAST_ROUNDS - 1, "few rounds"),
    ],
)
def test_verdict(ratio, noise, rounds, expected):
    assert verdict(ratio, noise, rounds) == expected


def test_noise_is_shown_in_place_of_a_verdict():
    noisy = measurement([1.0] * 5, [2.0] * 5, [1.5] * 5)
    text = str(report.report_of(report.header("bench"), [noisy]))
    assert "1.60 (1.60-1.60)  1.50 (1.50-1.50)  noise" in text
    assert "slower" not in text


@pytest.mark.parametrize("loss", [1.2, float("nan")])
def test_losses_that_differ_are_explained(loss):
    assert report.loss_notes(measurement([1.0], [1.0], [1.0])) == []
    (note,) = report.loss_notes(measurement([1.0], [1.0], [1.0], loss))
    assert f"differ: Keras 1.0000, mirrored {loss:.4f}. The cause" in note


def test_arms_take_turns_in_both_directions():
    log, rounds = [], []
    arms = {
        name: lambda steps, name=name: log.append((name, steps))
        for name in "abc"
    }
    times = measure.time_arms(arms, 10, 2, lambda: rounds.append(1))
    assert log == [(name, 10) for name in "abccba"]
    assert [len(each) for each in times.values()] == [2, 2, 2]
    assert len(rounds) == 2


def test_python_calls_of_a_step_are_counted():
    def one():
        pass

    def other():
        pass

    def arm(steps):
        other()  # once in a block
        for _ in range(steps):
            one()
            one()
            other()

    assert measure.calls_a_step(arm, [other.__code__]) == (3.0, 1.0)


def test_block_takes_about_as_long_as_asked_for(monkeypatch):
    class Clock:
        now = 0.0

    def arm(steps):
        # A call takes time too, which is not that of steps.
        Clock.now += 100.0 + 0.01 * steps

    monkeypatch.setattr(measure.time, "perf_counter", lambda: Clock.now)
    steps = measure.steps_that_take(arm, 10.0)
    assert steps == pytest.approx(1000, rel=1e-6)


@pytest.fixture
def four_devices(monkeypatch):
    """The devices that the tests have, whatever number is asked for."""
    monkeypatch.setattr(fit, "set_virtual_devices", lambda count: None)


@pytest.mark.parametrize(
    ("choice", "expected", "num_replicas"),
    [
        (Choice("mirrored"), keras_dist.MirroredStrategy, 4),
        (Choice("mirrored", 3), keras_dist.MirroredStrategy, 3),
        (Choice("central", 2), keras_dist.CentralStorageStrategy, 2),
        (Choice("one-device"), keras_dist.OneDeviceStrategy, 1),
    ],
)
def test_strategy_is_the_one_that_is_named(
    four_devices, choice, expected, num_replicas
):
    made = fit.make_strategy(choice)
    assert type(made) is expected
    assert made.num_replicas_in_sync == num_replicas
    with pytest.raises(
        keras_dist.DeviceError, match="(?s)--devices 64: .*cpu:3"
    ):
        fit.make_strategy(Choice(devices=64))


@pytest.mark.only_on("jax", reason="Others shard over workers only.")
def test_state_is_in_parts_where_options_say_so(four_devices):
    for split, of_all in ((SLOTS_SPLIT, False), (ALL_SPLIT, True)):
        plan = fit.make_strategy(Choice(split=split)).plan
        assert (plan.shards, plan.shards_variables) == (True, of_all)


def test_built_in_model_is_measured_without_the_users(monkeypatch):
    monkeypatch.setattr(fit, "SECONDS", 0.001)
    found = fit.run("", 64, Choice(devices=4), 1, sys.stderr)
    assert found.model == "digits"
    assert set(found.times) == {"Keras", "mirrored", "again"}
    assert not found.far_losses()
