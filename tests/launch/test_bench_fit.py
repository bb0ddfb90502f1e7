"""`keras-dist bench fit`: who takes part, what is counted, and yours."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from keras_dist.bench import fit
from keras_dist.bench import measure
from keras_dist.bench import tasks
from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.loops import MODELS
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.measure import Measurement
from keras_dist.bench.report import Output
from keras_dist.cli.main import app
from keras_dist.errors import BackendNotFoundError
from launch.bench_runs import BACKEND
from launch.bench_runs import OnlyLoops
from launch.bench_runs import Run
from launch.bench_runs import compared
from launch.bench_runs import shown

pytestmark = pytest.mark.runs_on("jax")

NATIVE = {
    "jax": {"DataParallel", "jit"},
    "tensorflow": {"Mirrored", "loop"},
    "torch": {"loop", "DDP", "processes"},
}[BACKEND]
# What is done in other processes is timed and no more.
COUNTED = NATIVE - {"DDP", "processes"} | {"Keras", "ours"}
# In a step: gradients, loss and metrics; what TensorFlow does not tell.
COLLECTIVES = {
    "jax": {"Keras": 0, "ours": 1, "DataParallel": 1, "jit": 1},
    "tensorflow": dict.fromkeys(COUNTED),
    "torch": {"Keras": 0, "ours": 3, "loop": 0},
}[BACKEND]

# Of the model with two inputs.
PARAMETERS = 6 * 3 + 3 + 3 + 1

MODULE = """
import keras
import numpy as np

NUMBER = 3

def two_inputs():
    left, right = keras.Input((4,), name="left"), keras.Input((2,))
    hidden = keras.layers.Concatenate()([left, right])
    hidden = keras.layers.Dense(3, "relu")(hidden)
    model = keras.Model([left, right], keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(20, n)).astype("float32") for n in (4, 2)]
    return model, x, rng.normal(size=(20, 1)).astype("float32")

def dense(compiled=True):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    if compiled:
        model.compile("sgd", "mse")
    return model

def of_lists():
    return dense(), [1.0, 2.0], np.ones((2, 1))

def of_unequal_lengths():
    return dense(), np.ones((20, 2)), np.ones((19, 1))

def of_few_rows():
    return dense(), np.ones((3, 2)), np.ones((3, 1))

def not_compiled():
    return dense(False), np.ones((20, 2)), np.ones((20, 1))

def no_data():
    return dense()

def failing():
    raise OSError("no such file")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bench")
    (made / "users.py").write_text(MODULE)
    return made


@pytest.fixture(scope="module")
def finished(folder):
    return Run(
        folder,
        *("fit", "--replicas", "2", "--markdown"),
        *("--model", "users:two_inputs", "--batch-size", "8"),
        *("--rounds", "2", "--block-ms", "1"),
    )


@pytest.fixture
def users(folder, monkeypatch):
    """What makes a task of one of the functions above."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return lambda name, rows=8: tasks.users_task(f"users:{name}", rows)


def test_it_says_what_was_measured(finished):
    finished.check(
        "fit",
        f"Native: {get_benchmarks('').fits_text}",
        "A/A is the arm 'Keras' against a copy of itself",
    )
    assert "Measuring users:two_inputs, N=2" in finished.process.stderr


@pytest.fixture
def found(finished):
    (setting,) = finished.content["settings"]
    return setting


def test_ours_is_compared_with_each_other_arm(finished):
    rows = compared(finished)
    assert rows == shown(finished)
    assert {row[:2] for row in rows} == {("users:two_inputs", "2")}
    assert {row[2] for row in rows} == {f"ours/{n}" for n in NATIVE | {"Keras"}}


def test_the_ratio_is_to_both_runs_of_keras(found):
    times = found["times"]
    assert set(times) == {"Keras", "ours", "again", *NATIVE}
    assert all(len(seen) == 2 for seen in times.values())
    base = np.mean([times["Keras"], times["again"]], 0)
    median = np.median(np.divide(times["ours"], base))
    (ours,) = [
        row for row in found["comparisons"] if row["name"] == "ours/Keras"
    ]
    assert ours["ratio"]["median"] == pytest.approx(median)
    noise = np.median(np.divide(times["again"], times["Keras"]))
    assert found["noise"]["median"] == pytest.approx(noise)


def test_all_arms_have_the_same_loss(found):
    for loss in found["losses"].values():
        assert loss == pytest.approx(found["losses"]["Keras"], rel=1e-3)


def test_collectives_are_those_of_a_step(found):
    assert found["counts"]["collectives"] == COLLECTIVES


def test_nothing_is_traced_again(found):
    counts = found["counts"]
    for arm in COUNTED:
        if BACKEND == "torch":
            assert counts["traces"][arm] is None
            assert counts["traced_again"][arm] is None
        else:
            assert counts["traces"][arm] >= 1
            assert counts["traced_again"][arm] == 0


def test_calls_and_bytes_are_counted(found):
    counts = found["counts"]
    assert set(counts["calls"]) == COUNTED
    assert all(calls > 0 for calls in counts["calls"].values())
    # One all-reduce among two: each sends as much as there is.
    num_bytes = 4 * PARAMETERS
    assert counts["planned_bytes"] == {"ours": 2 * num_bytes}
    # Weights and two slots; PyTorch's virtual devices share memory.
    copies = 1 if BACKEND == "torch" else 2
    assert counts["live_bytes"]["Keras"] >= 3 * num_bytes
    assert counts["live_bytes"]["ours"] >= copies * 3 * num_bytes


def test_rows_are_repeated_where_there_are_too_few(users):
    task = users("two_inputs")
    (left, right), y = task.data(5)
    assert (left.shape, right.shape, y.shape) == ((40, 4), (40, 2), (40, 1))
    np.testing.assert_array_equal(left[20:], left[:20])
    batches = task.batches(5)
    assert len(batches) == 5
    np.testing.assert_array_equal(batches[3][0][1], right[24:32])
    assert not task.is_known


def test_each_arm_has_a_model_of_its_own_with_the_same_weights(users):
    task = users("two_inputs")
    one, other = task.model(), task.model()
    assert one is not other
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_our_task_has_the_batches_of_the_other_commands():
    size = MODELS["small"]
    batches = Setting(size, ("cpu:0",)).batches()
    for found, expected in zip(
        tasks.task_of(size).batches(4), batches, strict=True
    ):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_lists", "`x` must be a NumPy array.*Received: float"),
        ("of_unequal_lengths", r"\[19, 20\] rows"),
        ("of_few_rows", "at least --batch-size.*at least 8"),
        ("not_compiled", "Call `model.compile` in the function"),
        ("no_data", r"Sequential. Expected: a tuple \(model, x, y\)"),
        (
            "failing",
            r"failed in users.py, line \d+, with OSError: no such file",
        ),
        ("nothing", "has no attribute 'nothing'"),
        ("NUMBER", "not a function. Received: 3"),
    ],
)
def test_a_function_that_is_no_use_is_an_error(users, name, message):
    with pytest.raises(ValueError, match=f"(?s)users:{name}.*{message}"):
        users(name)


@pytest.mark.parametrize("spec", ["users", ":dense", "users:"])
def test_what_names_no_function_is_an_error(spec):
    with pytest.raises(ValueError, match="Expected: 'module:function'"):
        tasks.users_task(spec, 8)


def test_a_module_that_is_not_there_is_an_error(users):
    with pytest.raises(ValueError, match="can't import 'no_such_module'"):
        tasks.users_task("no_such_module:dense", 8)


def test_losses_of_a_users_model_that_differ_are_told(users):
    task = users("two_inputs")
    losses = {"Keras": 1.0, "ours": 1.2, "again": 1.001}
    setting = Setting(task.size, ("cpu:0", "cpu:1"))
    measured = Measurement(setting, 1, {}, losses, {}, [], "Keras")
    (note,) = fit._notes([task], [measured])
    assert "differ: Keras 1.0000, ours 1.2000. In our arms" in note
    assert fit._notes([tasks.task_of(MODELS["small"])], []) == []


def test_a_block_takes_about_as_long_as_asked_for(monkeypatch):
    class Clock:
        now = 0.0

    class Ticking(Loop):
        def run(self, steps):
            # A call takes time too, which is not that of steps.
            Clock.now += 100.0 + 0.01 * steps
            return 0.0

    monkeypatch.setattr(measure.time, "perf_counter", lambda: Clock.now)
    steps = measure.steps_that_take(Ticking(), 10.0)
    assert steps == pytest.approx(1000, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "huge"), "'huge'"),
        (("--models", ","), "at least one of small, medium"),
        (("--replicas", "3,4"), "equal shares"),
        (("--replicas", "4", "--model", "nowhere"), "'module:function'"),
        (("--batch-size", "0"), "--batch-size"),
        (("--json", "no/such/folder/file.json"), "folder"),
    ],
)
def test_a_bad_option_is_an_error_that_says_so(monkeypatch, arguments, message):
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    monkeypatch.setenv("KERAS_DIST_VIRTUAL_DEVICES", "4")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    result = CliRunner().invoke(app, ["bench", "fit", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_backend_without_its_own_training_is_an_error(registered_benchmarks):
    registered_benchmarks()
    with pytest.raises(BackendNotFoundError, match="no training to compare"):
        fit.run_fit([4], ["small"], None, "cpu", 1, 0.001, Output())


def test_what_a_framework_does_not_count_is_unknown(
    registered_benchmarks, users, tmp_path
):
    registered_benchmarks(OnlyLoops)
    users("two_inputs")
    path = tmp_path / "bench.json"
    yours = ("users:two_inputs", 8)
    fit.run_fit([4], [], yours, "cpu", 1, 0.001, Output(path))
    (found,) = json.loads(path.read_text())["settings"]
    assert set(found["times"]) == {"Keras", "ours", "again"}
    for what in ("live_bytes", "collectives"):
        assert set(found["counts"][what].values()) == {None}
