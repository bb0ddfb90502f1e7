"""`keras-dist bench loops`: what it shows, and when it says nothing."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys
from importlib.metadata import version

import keras
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import keras_dist
from keras_dist.backend import get_backend
from keras_dist.backend import override_backend
from keras_dist.errors import BackendNotFoundError
from keras_dist.launch.bench import command
from keras_dist.launch.bench import measure
from keras_dist.launch.bench import report
from keras_dist.launch.bench.loops import MODELS
from keras_dist.launch.bench.loops import Loop
from keras_dist.launch.bench.loops import Setting
from keras_dist.launch.bench.portable import PortableLoop
from keras_dist.launch.bench.ratios import Ratio
from keras_dist.launch.bench.ratios import verdict
from keras_dist.testing.memory import MemoryBackend
from keras_dist_cli.main import app

BACKEND = keras.backend.backend()
# Not where the native loop is around a Keras model already.
BY_KERAS = {"Keras/native", "ours/Keras"}
QUIET = Ratio(1.0, 0.99, 1.01)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The command's process, and the file that it wrote."""
    path = tmp_path_factory.mktemp("bench") / "loops.json"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "KERAS_DIST_VIRTUAL_DEVICES"
    }
    process = subprocess.run(
        [
            *(sys.executable, "-m", "keras_dist_cli", "bench", "loops"),
            *("--models", "small", "--replicas", "1,2", "--rounds", "2"),
            *("--block-ms", "1", "--json", str(path), "--backend", BACKEND),
        ],
        env=inherited | {"COLUMNS": "80", "KERAS_BACKEND": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process, json.loads(path.read_text())


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
    counts = measure.Counts(12.0, 1.0, 0)
    return measure.Measurement(setting_of(2), 10, times, {}, counts)


def test_the_table_has_a_row_for_each_comparison(finished):
    process, _ = finished
    rows = re.findall(r"│ small +│ (\d) +│ (\S+/\S+)", process.stdout)
    assert {"1", "2"} == {replicas for replicas, _ in rows}
    of_one = {name for replicas, name in rows if replicas == "1"}
    of_two = {name for replicas, name in rows if replicas == "2"}
    assert {"ours/native", "scan/ours"} <= of_one
    assert of_two >= of_one | {"reduced/native", "ragged/ours"}
    by_keras = set() if BACKEND == "tensorflow" else BY_KERAS
    assert of_one & BY_KERAS == by_keras
    assert ("ours/shmap" in of_two) == (BACKEND == "jax")


def test_it_says_what_was_measured(finished):
    process, _ = finished
    text = " ".join(process.stdout.split())
    for part in (
        f"{BACKEND} {version(BACKEND)}",
        f"keras {keras.__version__}",
        f"Native: {get_backend().native_loop_text}",
        "A/A is the native loop against a copy of itself",
        "Measuring small, 2 replicas",
    ):
        assert part in text


def test_it_fits_a_terminal_and_shows_no_bar(finished):
    process, _ = finished
    assert max(map(len, process.stdout.splitlines())) <= 80
    assert "\x1b" not in process.stdout
    assert "━ 2/2" not in process.stdout


def test_the_file_has_all_numbers(finished):
    _, content = finished
    assert content["backend"] == BACKEND
    assert content["versions"]["keras"] == keras.__version__
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
    _, content = finished
    for each in content["settings"]:
        losses = {k: v for k, v in each["losses"].items() if k != "ragged"}
        for loss in losses.values():
            assert loss == pytest.approx(losses["native"], rel=1e-3)
        traced_again = 0 if BACKEND != "torch" else None
        assert each["counts"]["traces"] == traced_again


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
    assert verdict(ratio, QUIET) == expected


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
    assert verdict(Ratio(2.0, 1.9, 2.1), noise) == "noise"


def test_the_base_of_our_ratio_is_the_mean_of_the_loops_around_it():
    measured = measurement([1.0] * 3, [2.0] * 3, [1.02] * 3, scan=[0.5] * 3)
    rows = measured.comparisons()
    ratios = {row.name: row.ratio.median for row in rows}
    assert ratios["ours/native"] == pytest.approx(2 / 1.01)
    assert ratios["scan/ours"] == 0.25
    assert [row.verdict for row in rows] == ["slower", "faster"]
    assert measured.noise.median == 1.02


def test_the_report_shows_a_refused_verdict():
    console = Console(file=io.StringIO(), width=80)
    noisy = measurement([1.0] * 3, [2.0] * 3, [1.5] * 3)
    report.show(console, [noisy], "by hand.")
    text = console.file.getvalue()
    assert re.search(r"ours/native .* 1.50 \(1.50-1.50\) │ noise", text)
    assert "slower" not in text
    assert report.as_json([noisy], "by hand.")["settings"][0]["counts"] == {
        "calls": 12.0,
        "native_calls": 1.0,
        "traces": 0,
    }


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

    assert measure._calls(Calling()) == 2.0


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
    ],
)
def test_a_bad_option_is_an_error_that_says_so(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_more_replicas_than_devices_are_an_error(monkeypatch):
    monkeypatch.setattr(command, "list_devices", lambda kind: [f"{kind}:0"])
    with pytest.raises(keras_dist.DeviceError, match="2 replicas on 'gpu'"):
        command.devices_for(2, "gpu")


def test_virtual_devices_that_come_too_late_are_an_error(invoke):
    assert keras_dist.list_devices("cpu")
    result = invoke("--replicas", "64")
    assert result.exit_code == 2
    assert "virtual_devices" in result.output


def test_a_backend_without_loops_of_its_own_is_an_error():
    with (
        override_backend(MemoryBackend()),
        pytest.raises(BackendNotFoundError, match="no loop to compare with"),
    ):
        command.run_loops([1], ["small"], "cpu", 1, 0.001, None)


def test_bench_alone_shows_its_commands():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    assert "loops" in result.output


def test_native_loops_are_imported_when_they_are_needed():
    code = (
        "import sys, keras_dist; keras_dist.list_devices(); "
        "sys.exit(any(name.startswith('keras_dist_') and "
        "name.endswith('.bench') for name in sys.modules))"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=120,
        cwd=pathlib.Path(__file__).parent,
    )
