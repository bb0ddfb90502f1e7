"""`keras-dist plan` counts a model's memory and traffic without its values."""

import json
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.cli.jobs.plan import load_of_named
from keras_dist.errors import UnsupportedModelError
from keras_dist.planning.estimates import Placement
from keras_dist.planning.estimates import load_of_parameters
from keras_dist.planning.estimates import memory
from keras_dist.planning.estimates import transfers
from keras_dist.tools.counting import load_of

BACKEND = keras.backend.backend()


@pytest.fixture
def planned(invoke):
    """What the command computes, as JSON."""

    def run(line):
        result = invoke(f"plan {line} --json -")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def load(invoke):
    """Returns the load of a function of `models_to_plan`, and its text."""
    return lambda name, *args, **options: load_of_named(
        f"models_to_plan:{name}", *args, **options
    )


@pytest.fixture
def models(invoke):
    import models_to_plan

    return models_to_plan


def slots(load):
    return sum(flat.part(1) for flat in load.slots)


@pytest.mark.parametrize(
    "policy", ["float32", "bfloat16", "mixed_bfloat16", "mixed_float16"]
)
def test_parameters_are_counted_as_a_model_is(policy):
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(30, dtype=policy)]
    )
    model.compile("adam", "mse")
    if policy == "mixed_float16":  # as it is where that is the global one
        adam = keras.optimizers.Adam()
        model.compile(keras.optimizers.LossScaleOptimizer(adam), "mse")
    model.optimizer.build(model.trainable_variables)
    found = load_of(model)
    computed = load_of_parameters(630, policy, "adam")
    assert found.trainable == computed.trainable
    assert slots(found) == slots(computed)
    # On TensorFlow, steps are counted in 8 bytes.
    steps = 4 * (2 if policy == "mixed_float16" else 1)
    more = (0, steps, steps + 4) if BACKEND == "tensorflow" else (0,)
    assert found.counters - computed.counters in more


def test_a_model_is_counted_without_values_and_leaves_keras_as_it_was(load):
    before = keras.Variable.__init__
    threads = threading.active_count()
    found, text = load("huge")
    units = 10**12
    assert found.trainable == 4 * (5 * units + 3 * units + 3 * units + 3)
    assert sum(flat.length for flat in found.slots) * 2 == found.trainable
    assert "11,000,000,000,003 trainable parameters, float32" in text
    assert keras.Variable.__init__ is before
    assert threading.active_count() == threads
    with keras.StatelessScope():
        pass  # Its end gives values to variables that wait for them.
    assert keras.ops.convert_to_numpy(keras.Variable(2.0)) == 2.0


def test_a_model_is_counted_as_the_summary_of_it(load, models):
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = models.build()
    model.fit(np.ones((4, 5)), np.ones((4, 3)), verbose=0)
    expected, _ = load("build")
    assert expected == load_of(model)
    # `bench --model` takes the model and its data.
    assert expected == load("measured")[0]
    found = keras_dist.summary(model)
    *kept, _ = found.devices[1].of_groups
    placement = Placement(("cpu:0", "cpu:1"))
    assert memory(expected, placement)["cpu:1"].kept == sum(kept)
    assert transfers(expected, placement) == found.transfers


def test_a_models_optimizer_counts_unless_another_is_named(load):
    own, _ = load("momentum")
    assert slots(own) == own.trainable
    other, text = load("momentum", "adam")
    assert slots(other) == 2 * own.trainable
    assert "adam" in text
    bare, _ = load("uncompiled")
    assert slots(bare) == 2 * bare.trainable


def test_the_function_runs_in_the_thread_that_ctrl_c_reaches(load, models):
    """Another one's end may abort the process, once Python has ended."""
    load("here")
    assert models.threads == [threading.current_thread()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("failing", "failed in .*OSError: no such file"),
        ("none", "no attribute 'none'"),
        ("number", "not a function. Received: 3"),
        ("unbuilt", "not built"),
        ("text", "type str"),
    ],
)
def test_a_model_that_is_none_is_an_error(load, name, message):
    with pytest.raises(ValueError, match=message):
        load(name)


def test_what_else_can_not_be_counted_is_an_error(load):
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        load_of_named("no_such_module:build")
    with pytest.raises(ValueError, match="Received: 'nosuch'"):
        load("build", "nosuch")
    # PyTorch's workers can shard it, and TensorFlow nothing.
    if BACKEND == "jax":
        with pytest.raises(UnsupportedModelError):
            load("muon", split="optimizer")


def test_the_command_shows_memory_traffic_and_others(invoke, tmp_path):
    path = tmp_path / "plan.json"
    result = invoke(
        "plan --strategy mirrored --devices 8 --optimizer-state sharded "
        f"--params 7e9 --dtype bfloat16 --json {path}"
    )
    assert result.exit_code == 0, result.output
    for part in (
        "7,000,000,000 parameters, bfloat16, adam, optimizer sharded",
        *("device 0-7", "17.5 GB", "gradients, reduce-scatter", "12.2 GB"),
        *("196.0 GB", "Side by side", "central"),
    ):
        assert part in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert json.loads(path.read_text())["plan"] == "optimizer sharded"
    assert "'targets'" in invoke("plan --help").output


def test_options_become_a_plan(planned):
    content = planned("--params 1000 --devices 4")
    plans = content["plans"]
    assert content["plan"] == "mirrored"
    assert set(plans) == {
        *("one device", "mirrored", "optimizer sharded", "variables sharded"),
        "central",
    }
    sharded = plans["variables sharded"]["memory"]["device 3"]
    assert (sharded["kept"], sharded["gradients"]) == (3008, 1000)
    assert plans["mirrored"]["memory"]["device 3"]["kept"] == 12008
    assert plans["mirrored"]["bytes_sent"] == 2 * 3 * 4000
    central = plans["central"]["memory"]
    assert central["device 0"]["kept"] == 0
    assert central["parameter device"]["kept"] == 12008
    content = planned(
        "--strategy multi-worker --workers 3 --devices 2 --params 1k "
        "--optimizer sgd --activations 1e3"
    )
    found = content["plans"][content["plan"]]
    assert (found["workers"], found["devices"]) == (3, 2)
    assert found["memory"]["device 1"]["kept"] == 4008
    assert found["memory"]["device 1"]["in_a_step"] == 9008
    assert "central" not in content["plans"]
    found = planned(
        "--strategy central --parameter-devices 2 --params 1k --slots 3"
    )["plans"]["central"]["memory"]
    assert found["parameter device 1"]["kept"] == 8004
    content = planned("--strategy one-device --params 1k")
    assert content["plan"] == "one device"


def test_a_named_model_is_planned(planned, invoke):
    content = planned("--model models_to_plan:build --devices 2")
    trainable = 4 * (5 * 7 + 7 + 2 * 7 + 7 * 3 + 3)
    assert content["load"]["trainable"] == trainable
    assert content["plans"]["mirrored"]["bytes_sent"] == 2 * trainable
    # Data builds a model without shapes.
    content = planned("--model models_to_plan:with_data")
    assert content["load"]["trainable"] == 4 * (6 * 3 + 3)
    # What a function prints is no part of the JSON.
    result = invoke("plan --model models_to_plan:talkative --json -")
    assert "building" in result.stderr
    assert json.loads(result.stdout)["load"]["trainable"]


def test_a_keras_that_is_too_old_is_an_error_in_one_line(tmp_path):
    code = (
        "from keras_dist.environment import versions\n"
        "versions.requires = lambda name: ['keras>=99.0']\n"
        "from keras_dist.cli.main import app\n"
        "app(['plan', '--model', 'a:b'])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 2
    assert "Error: keras_dist needs a newer Keras. Received: " in run.stderr
    assert "Traceback" not in run.stderr
