"""`keras-dist bench memory`: what it measures is what was promised."""

import gc
import re

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

from keras_dist.bench import memory
from keras_dist.bench.benchmarks import get_benchmarks
from keras_dist.bench.memory import MeasuredMemory
from keras_dist.bench.memory import memory_table
from keras_dist.bench.report import Output
from keras_dist.cli.main import app
from keras_dist.core.device import Device
from keras_dist.errors import BackendNotFoundError
from launch.bench_runs import BACKEND
from launch.bench_runs import OnlyLoops
from launch.bench_runs import Run
from sharded.helpers import SHARDS_ON_DEVICES
from sharded.helpers import shards

pytestmark = pytest.mark.runs_on("torch")

NUM_DEVICES = 2
COMPUTING = [f"cpu:{index}" for index in range(NUM_DEVICES)]
KEEPER = f"cpu:{NUM_DEVICES}"
# Four layers of 32 x 32 + 32.
PARAMETERS = 4224
TRAINABLE = 4 * PARAMETERS
# The optimizer's counters and the metric's state, and what a framework keeps
# for itself: seeds, a loss, a learning rate.
SLACK = 200
SHARES_MEMORY = BACKEND == "torch"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Run(
        tmp_path_factory.mktemp("bench"),
        *("memory", "--devices", str(NUM_DEVICES)),
        *("--params", str(PARAMETERS)),
    )


@pytest.fixture
def arms(finished):
    return finished.content["arms"]


def near(number):
    return pytest.approx(number, rel=0, abs=SLACK)


def test_plain_keras_has_parameters_and_slots_on_one_device(arms):
    plain = arms["plain Keras"]
    assert plain["parameters"] == PARAMETERS
    assert plain["planned"] == {"cpu:0": near(3 * TRAINABLE)}
    # PyTorch's optimizers zero gradients before a step, not after it.
    gradients = TRAINABLE if BACKEND == "torch" else 0
    assert plain["measured"] == {"cpu:0": near(3 * TRAINABLE + gradients)}


def test_mirrored_is_as_much_on_each_device(arms):
    found = arms["mirrored"]
    each = dict.fromkeys(COMPUTING, near(3 * TRAINABLE))
    assert found["planned"] == each
    if SHARES_MEMORY:
        each |= dict.fromkeys(COMPUTING[1:], 0)
    assert found["measured"] == each
    assert found["bytes_sent"] == 2 * (NUM_DEVICES - 1) * TRAINABLE


def test_central_is_as_much_on_the_parameter_device_only(arms):
    found = arms["central"]
    each = dict.fromkeys(COMPUTING, near(0)) | {KEEPER: near(3 * TRAINABLE)}
    assert found["planned"] == each
    assert found["measured"] == each
    assert found["bytes_sent"] == 2 * NUM_DEVICES * TRAINABLE


@shards
def test_a_sharded_optimizer_is_a_part_on_each_device(arms):
    found = arms["optimizer sharded"]
    # All of these sizes are even.
    part = 2 * TRAINABLE // NUM_DEVICES
    each = dict.fromkeys(COMPUTING, near(TRAINABLE + part))
    assert found["planned"] == each
    if SHARES_MEMORY:
        each |= dict.fromkeys(COMPUTING[1:], near(part))
    assert found["measured"] == each
    assert found["bytes_sent"] == arms["mirrored"]["bytes_sent"]


@shards
def test_sharded_variables_are_a_part_on_each_device(arms):
    found = arms["variables sharded"]
    part = 3 * TRAINABLE / NUM_DEVICES
    # The plan counts small variables, which are whole, as parts too.
    each = dict.fromkeys(COMPUTING, pytest.approx(part, rel=0.05))
    assert found["planned"] == each
    assert found["measured"] == each
    assert found["bytes_sent"] == arms["mirrored"]["bytes_sent"]


def test_arms_are_those_that_the_backend_has(arms):
    expected = ["plain Keras", "mirrored", "central"]
    if SHARDS_ON_DEVICES:
        expected += ["optimizer sharded", "variables sharded"]
    assert list(arms) == expected


def test_it_says_what_was_measured(finished):
    counted = get_benchmarks("").live_bytes_text
    assert finished.process.stderr.startswith("Measuring")
    finished.check("memory", "A model of 4,224 parameters", counted)
    assert finished.content["counted"] == counted
    assert "Measuring mirrored" in finished.process.stderr
    assert re.search(r"central +cpu:0", finished.process.stdout)


def test_devices_that_hold_the_same_share_a_row():
    measured = [
        MeasuredMemory("plain Keras", 10, {"cpu:0": 120}, {"cpu:0": 120}, 0),
        MeasuredMemory(
            "mirrored",
            10,
            {"cpu:0": 120, "cpu:1": 120, "cpu:2": 60},
            {"cpu:0": 120, "cpu:1": 120},
            40,
        ),
    ]
    columns = [list(column.cells) for column in memory_table(measured).columns]
    assert columns[1] == ["cpu:0", "cpu:0-1", "cpu:2"]
    assert columns[4] == ["1.00", "1.00", "0.50"]
    assert columns[3] == ["120 B", "120 B", "0 B"]


@pytest.mark.parametrize("wanted", [1, 1000, 20_000_000])
def test_the_model_is_about_as_large_as_asked_for(wanted, monkeypatch):
    widths = []
    monkeypatch.setattr(
        memory.keras.layers, "Dense", lambda n, _: widths.append(n)
    )
    monkeypatch.setattr(memory.keras, "Sequential", lambda _: Built())
    memory.build_model(wanted)
    assert len(set(widths)) == 1
    found = sum(width**2 + width for width in widths)
    assert found == pytest.approx(wanted, rel=0.1, abs=8)


class Built:
    def compile(self, *_):
        pass


@pytest.fixture
def no_collection():
    """Nothing but what the test itself lets go is freed in it."""
    gc.disable()
    yield
    gc.enable()


def test_what_is_alive_is_counted(no_collection):
    benchmarks = get_benchmarks("")
    model = keras.Sequential([keras.Input((2,))])
    before = benchmarks.live_bytes(model)
    value = np.random.default_rng(0).normal(size=(500, 500))
    variable = keras.Variable(value.astype("float32"))
    after = benchmarks.live_bytes(model)
    cpu = Device("cpu", 0)
    assert after[cpu] - before.get(cpu, 0) == 500 * 500 * 4
    del variable
    assert benchmarks.live_bytes(model).get(cpu, 0) == before.get(cpu, 0)


@pytest.mark.parametrize("found", [[], [OnlyLoops]])
def test_a_backend_that_can_not_measure_is_an_error(
    registered_benchmarks, found
):
    registered_benchmarks(*found)
    with pytest.raises(BackendNotFoundError, match="how much memory is held"):
        memory.run_memory(2, 1000, Output())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "0"), "--devices"),
        (("--params", "many"), "'many'"),
        (("--json", "no/such/folder/file.json"), "folder"),
        (("--backend", "nosuch"), "'nosuch'"),
    ],
)
def test_bad_options_are_errors_that_say_so(monkeypatch, arguments, message):
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    result = CliRunner().invoke(app, ["bench", "memory", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
