"""`keras-dist bench loops`: what it shows, and when it says nothing."""

import os
import pathlib
import re
import subprocess
import sys
from importlib.metadata import version

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

import keras_dist
from keras_dist.bench import benchmarks
from keras_dist.bench import loops
from keras_dist.bench import measure
from keras_dist.bench import portable
from keras_dist.bench import report
from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.loops import MODELS
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.measure import LEAST_ROUNDS
from keras_dist.bench.measure import Measurement
from keras_dist.bench.measure import Ratio
from keras_dist.bench.measure import pairs_of
from keras_dist.bench.measure import verdict
from keras_dist.bench.portable import PortableLoop
from keras_dist.cli import environment
from keras_dist.cli.main import app
from keras_dist.errors import BackendNotFoundError
from launch.bench_runs import BACKEND
from launch.bench_runs import Run
from launch.bench_runs import compared
from launch.bench_runs import shown

# Not where the native loop is around a Keras model already.
BY_KERAS = {"Keras/native", "ours/Keras"}
QUIET = Ratio(1.0, 0.99, 1.01)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Run(
        tmp_path_factory.mktemp("bench"),
        *("loops", "--models", "small", "--replicas", "1,2"),
        *("--rounds", "2", "--block-ms", "1"),
    )


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command in this process."""
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    monkeypatch.setenv("KERAS_DIST_VIRTUAL_DEVICES", "4")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    return lambda *arguments: CliRunner().invoke(
        app, ["bench", "loops", *arguments]
    )


def setting_of(num_replicas):
    devices = tuple(f"cpu:{i}" for i in range(num_replicas))
    return Setting(MODELS["small"], devices)


def measurement(native, ours, again, **others):
    """A `Measurement` of times that are given."""
    times = {"native": native, "ours": ours, "again": again, **others}
    counts = {
        "calls": {"ours": 12.0, "native": 1.0},
        "traced_again": {"ours": 0},
    }
    return Measurement(setting_of(2), 10, times, {}, counts, pairs_of(times))


def test_the_table_has_a_row_for_each_comparison(finished):
    rows = shown(finished)
    assert rows == compared(finished)
    assert {"1", "2"} == {row[1] for row in rows}
    of_one = {row[2] for row in rows if row[1] == "1"}
    of_two = {row[2] for row in rows if row[1] == "2"}
    assert {"ours/native", "scan/ours"} <= of_one
    assert of_two >= of_one | {"reduced/native", "ragged/ours"}
    by_keras = set() if BACKEND == "tensorflow" else BY_KERAS
    assert of_one & BY_KERAS == by_keras
    assert ("ours/shmap" in of_two) == (BACKEND == "jax")


def test_it_says_what_was_measured(finished):
    finished.check(
        "loops",
        f"{BACKEND} {version(BACKEND)}",
        f"Native: {get_benchmarks('').loop_text}",
        "A/A is the arm 'native' against a copy of itself",
    )
    assert "Measuring small, N=2" in finished.process.stderr


def test_the_file_has_all_numbers(finished):
    content = finished.content
    assert [each["replicas"] for each in content["settings"]] == [1, 2]
    for each in content["settings"]:
        assert (each["model"], each["rows"]) == ("small", 64)
        assert each["widths"] == [64, 32, 10]
        assert len(each["devices"]) == each["replicas"]
        assert {"native", "again", "ours", "scan"} <= set(each["times"])
        assert all(len(seen) == 2 for seen in each["times"].values())
        assert each["steps"] % 10 == 0
        native, *_ = each["comparisons"]
        assert native["name"] == "ours/native"
        paired = np.divide(
            each["times"]["ours"],
            np.mean([each["times"]["native"], each["times"]["again"]], 0),
        )
        assert native["ratio"]["median"] == pytest.approx(np.median(paired))


def test_all_arms_have_the_same_loss_and_trace_once(finished):
    for each in finished.content["settings"]:
        losses = {k: v for k, v in each["losses"].items() if k != "ragged"}
        for loss in losses.values():
            assert loss == pytest.approx(losses["native"], rel=1e-3)
        traced_again = 0 if BACKEND != "torch" else None
        assert each["counts"]["traced_again"] == {"ours": traced_again}


def test_ratios_are_medians_of_pairs():
    ratio = Ratio.of([2.0, 9.0, 3.0, 8.0, 5.0], [1.0, 3.0, 3.0, 2.0, 1.0])
    assert ratio == Ratio(3.0, 2.0, 4.0)
    assert str(ratio) == "3.00 (2.00-4.00)"


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio(1.2, 1.1, 1.3), "slower"),
        (Ratio(0.8, 0.7, 0.9), "faster"),
        (Ratio(1.02, 1.01, 1.03), "level"),
        (Ratio(1.2, 0.9, 1.3), "level"),
        (Ratio(0.9, 0.8, 1.1), "level"),
    ],
)
def test_a_verdict_of_a_quiet_run(ratio, expected):
    assert verdict(ratio, QUIET, LEAST_ROUNDS) == expected


@pytest.mark.parametrize(
    "noise",
    [
        Ratio(1.04, 1.0, 1.05),
        Ratio(0.96, 0.95, 1.0),
        Ratio(1.0, 0.85, 1.1),
        Ratio(float("nan"), 1.0, 1.0),
    ],
)
def test_a_verdict_is_refused_in_noise(noise):
    assert verdict(Ratio(2.0, 1.9, 2.1), noise, LEAST_ROUNDS) == "noise"


@pytest.mark.parametrize("rounds", [1, 4])
def test_there_is_no_verdict_of_few_rounds(rounds, capsys):
    few = measurement([1.0] * rounds, [2.0] * rounds, [1.0] * rounds)
    made = report.report_of("loops", [few], "by hand.", [])
    report.Output().publish(made)
    text = capsys.readouterr().out
    assert re.search(r"ours/native +2.00 \(2.00-2.00\) .* few rounds\n", text)
    told = " ".join(text.split())
    assert "With fewer than 5 rounds there is no verdict." in told
    (found,) = made.content["settings"]
    assert found["comparisons"][0]["verdict"] == "few rounds"
    enough = measurement([1.0] * 5, [2.0] * 5, [1.0] * 5)
    assert enough.comparisons()[0].verdict == "slower"


def test_the_base_of_our_ratio_is_the_mean_of_the_loops_around_it():
    measured = measurement([1.0] * 5, [2.0] * 5, [1.02] * 5, scan=[0.5] * 5)
    rows = measured.comparisons()
    ratios = {row.name: row.ratio.median for row in rows}
    assert ratios["ours/native"] == pytest.approx(2 / 1.01)
    assert ratios["scan/ours"] == 0.25
    assert [row.verdict for row in rows] == ["slower", "faster"]
    assert measured.noise.median == 1.02


def test_the_report_shows_a_refused_verdict(capsys):
    noisy = measurement([1.0] * 5, [2.0] * 5, [1.5] * 5)
    made = report.report_of("loops", [noisy], "by hand.", ["More."])
    report.Output().publish(made)
    text = capsys.readouterr().out
    assert re.search(r"ours/native +1.60 \(1.60-1.60\) .* noise", text)
    assert "slower" not in text
    assert "Native: by hand.\nMore.\n" in text
    assert made.content["settings"][0]["counts"] == {
        "calls": {"ours": 12.0, "native": 1.0},
        "traced_again": {"ours": 0},
    }


def test_markdown_is_what_the_table_shows(capsys):
    quiet = measurement([1.0] * 5, [2.0] * 5, [1.02] * 5)
    made = report.report_of("loops", [quiet], "by hand.", [])
    report.Output(markdown=True).publish(made)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "| Model | N | Compared | Ratio | A/A | Verdict |",
        "| --- | ---: | --- | ---: | ---: | --- |",
        "| small | 2 | ours/native | 1.98 (1.98-1.98) | 1.02 (1.02-1.02) "
        "| slower |",
    ]
    assert "| small | 2 | native | 1000.000 | 1 |  |" in lines
    assert f"{os.cpu_count()} CPU cores" in " ".join(lines)


class Numbered(Loop):
    """Writes down when it is run."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def run(self, steps):
        self.log.append((self.name, steps))
        return 1.0


def test_arms_take_turns_in_both_directions():
    log, rounds = [], []
    arms = {name: Numbered(name, log) for name in "abc"}
    times = measure.time_arms(arms, 10, 2, lambda: rounds.append(1))
    assert [name for name, _ in log] == list("abccba")
    assert {steps for _, steps in log} == {10}
    assert [len(seen) for seen in times.values()] == [2, 2, 2]
    assert len(rounds) == 2


def test_python_calls_of_a_step_are_counted():
    class Calling(Loop):
        def run(self, steps):
            for _ in range(steps):
                self.one()
                self.one()
            return 0.0

        def one(self):
            pass

    assert measure.calls_a_step(Calling(), 20) == 2.0


@pytest.mark.parametrize("loss", [2.5, float("nan")])
def test_arms_that_compute_something_else_are_refused(loss):
    measure.check_losses({"native": 2.0, "ours": 2.001, "ragged": 9.0})
    with pytest.raises(measure.LossMismatchError, match="arm 'ours'"):
        measure.check_losses({"native": 2.0, "ours": loss})


def test_every_arm_starts_with_the_same_weights_and_batches():
    setting = setting_of(2)
    loop = PortableLoop(setting)
    x, y = loop.batches[0]
    expected_x, expected_y = setting.batches()[0]
    for value, expected in ((x, expected_x), (y, expected_y)):
        parts = [keras.ops.convert_to_numpy(part) for part in value.values]
        np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert expected_x.shape == (64, 64)
    assert len({batch[1].tobytes() for batch in setting.batches()}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replicas", "0"), "numbers of at least 1"),
        (("--replicas", "two"), "'two'"),
        (("--replicas", ""), "numbers of at least 1"),
        (("--models", "small,huge"), "'huge'"),
        (("--models", ","), "at least one of small, medium"),
        (("--rounds", "0"), "--rounds"),
        (("--block-ms", "0"), "--block-ms"),
        (("--device", "abacus"), "abacus"),
        (("--backend", "nosuch"), "'nosuch'"),
        (("--json", "no/such/folder/file.json"), "folder"),
        (("--plot", "no/such/folder/file.png"), "folder"),
        (("--plot", "picture.txt"), "ends with .png"),
        (("--replicas", "3,4"), "equal shares"),
    ],
)
def test_a_bad_option_is_an_error_that_says_so(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_more_replicas_than_devices_are_an_error(monkeypatch):
    monkeypatch.setattr(loops, "list_devices", lambda kind: [f"{kind}:0"])
    with pytest.raises(keras_dist.DeviceError, match="2 replicas on 'gpu'"):
        loops.groups_of_devices([1, 2], "gpu")


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])]
)
def test_all_devices_are_powers_of_two_and_all(monkeypatch, count, expected):
    present = [f"gpu:{index}" for index in range(count)]
    monkeypatch.setattr(loops, "list_devices", lambda kind: present)
    groups = loops.groups_of_devices(None, "gpu")
    assert list(map(len, groups)) == expected
    assert groups[-1] == tuple(present)


def test_a_picture_without_matplotlib_is_an_error(monkeypatch, invoke):
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    result = invoke("--plot", "picture.png")
    assert result.exit_code == 2
    assert "pip install 'keras-dist[plot]'" in result.output


def test_virtual_devices_that_come_too_late_are_an_error(invoke):
    assert keras_dist.list_devices("cpu")
    result = invoke("--replicas", "64")
    assert result.exit_code == 2
    assert "virtual_devices" in result.output


def test_benchmarks_are_those_of_the_backend_in_use():
    found = get_benchmarks("has none")
    assert isinstance(found, Benchmarks)
    assert type(found).__module__.split(".")[-1] == BACKEND


def test_a_backend_without_loops_of_its_own_is_an_error(registered_benchmarks):
    registered_benchmarks()
    with pytest.raises(
        BackendNotFoundError,
        match=f"'{BACKEND}' has no loop to compare with"
        f".*Backend object .*'{benchmarks.ENTRY_POINT_GROUP}'",
    ):
        portable.run_loops([4], ["small"], "cpu", 1, 0.001, report.Output())


def test_bench_alone_shows_its_commands():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    for name in ("fit", "loops", "workers", "memory"):
        assert name in result.output


def test_benchmarks_are_imported_when_they_are_needed():
    code = (
        "import sys, keras_dist; keras_dist.list_devices(); "
        "sys.exit(any(name.startswith('keras_dist.bench') "
        "for name in sys.modules))"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=120,
        cwd=pathlib.Path(__file__).parent,
    )
