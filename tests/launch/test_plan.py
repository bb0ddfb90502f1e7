"""`keras-dist plan`: the arithmetic, and what it does with options."""

import json
import os
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

import keras_dist
from keras_dist.cli.environment import CPU_ONLY
from keras_dist.cli.jobs.plan import load_of_named
from keras_dist.cli.main import app
from keras_dist.errors import UnsupportedModelError
from keras_dist.planning.estimates import Placement
from keras_dist.planning.estimates import load_of_parameters
from keras_dist.planning.estimates import memory
from keras_dist.planning.estimates import transfers
from keras_dist.tools.counting import load_of

BACKEND = keras.backend.backend()


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command in this process."""
    for name in CPU_ONLY:
        monkeypatch.setenv(name, "")  # what the command sets is set back
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda *arguments: CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def planned(invoke):
    """What the command computes, as JSON."""

    def run(*arguments):
        result = invoke(*arguments, "--json", "-")
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    return run


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module with models."""
    (tmp_path / "models_to_plan.py").write_text(
        "import threading\n"
        "import keras\n"
        "import numpy as np\n"
        "threads = []\n"
        "def build(optimizer='adam', units=7):\n"
        "    model = keras.Sequential([keras.Input((5,)),\n"
        "        keras.layers.Dense(units),\n"
        "        keras.layers.BatchNormalization(),\n"
        "        keras.layers.Dropout(0.5), keras.layers.Dense(3)])\n"
        "    model.compile(optimizer, 'mse', metrics=['mae'])\n"
        "    return model\n"
        "def here():\n"
        "    threads.append(threading.current_thread())\n"
        "    return build()\n"
        "def huge():\n"
        "    return build(units=10**12)\n"
        "def momentum():\n"
        "    return build(keras.optimizers.SGD(0.1, momentum=0.9))\n"
        "def muon():\n"
        "    return build('muon')\n"
        "def bare():\n"
        "    return keras.Sequential([keras.Input((5,)),\n"
        "        keras.layers.Dense(7)])\n"
        "def unbuilt():\n"
        "    return keras.Sequential([keras.layers.Dense(7)])\n"
        "def talkative():\n"
        "    print('building')\n"
        "    return build()\n"
        "class Own(keras.Model):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.dense = keras.layers.Dense(3)\n"
        "    def call(self, x):\n"
        "        return self.dense(x)\n"
        "def with_other_data():\n"
        "    return Own(), {'a': np.ones((2, 5))}\n"
        "def with_data():\n"
        "    return Own(), np.ones((2, 5)), np.ones((2, 3))\n"
        "number = 3\n"
        "def text():\n"
        "    return 'model'\n"
        "def measured():\n"
        "    return build(), [[1.0] * 5], [1.0]\n"
        "def failing():\n"
        "    raise OSError('no such file')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "models_to_plan"
    sys.modules.pop("models_to_plan", None)


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
    assert sum(flat.part(1) for flat in found.slots) == sum(
        flat.part(1) for flat in computed.slots
    )
    # On TensorFlow, steps are counted in 8 bytes.
    steps = 4 * (2 if policy == "mixed_float16" else 1)
    more = (0, steps, steps + 4) if BACKEND == "tensorflow" else (0,)
    assert found.counters - computed.counters in more


def test_a_model_is_counted_without_values(module):
    load, text = load_of_named(f"{module}:huge")
    units = 10**12
    assert load.trainable == 4 * (5 * units + 3 * units + 3 * units + 3)
    assert sum(flat.length for flat in load.slots) * 2 == load.trainable
    assert "11,000,000,000,003 trainable parameters, float32" in text


def test_a_model_is_counted_as_the_summary_of_it(module):
    import models_to_plan

    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = models_to_plan.build()
    model.fit(np.ones((4, 5)), np.ones((4, 3)), verbose=0)
    load, _ = load_of_named(f"{module}:build")
    assert load == load_of(model)
    found = keras_dist.summary(model)
    *kept, _ = found.devices[1].of_groups
    placement = Placement(("cpu:0", "cpu:1"))
    assert memory(load, placement)["cpu:1"].kept == sum(kept)
    assert transfers(load, placement) == found.transfers


def test_a_models_optimizer_counts_unless_another_is_named(module):
    own, _ = load_of_named(f"{module}:momentum")
    assert sum(flat.part(1) for flat in own.slots) == own.trainable
    other, text = load_of_named(f"{module}:momentum", "adam")
    assert sum(flat.part(1) for flat in other.slots) == 2 * own.trainable
    assert "adam" in text
    bare, _ = load_of_named(f"{module}:bare")
    assert sum(flat.part(1) for flat in bare.slots) == 2 * bare.trainable


def test_what_is_measured_can_be_planned(module):
    """`bench --model` takes the model and its data."""
    measured, _ = load_of_named(f"{module}:measured")
    assert measured == load_of_named(f"{module}:build")[0]


def test_counting_leaves_keras_as_it_was(module):
    before = keras.Variable.__init__
    threads = threading.active_count()
    load_of_named(f"{module}:huge")
    assert keras.Variable.__init__ is before
    assert threading.active_count() == threads
    with keras.StatelessScope():
        pass  # Its end gives values to variables that wait for them.
    assert keras.ops.convert_to_numpy(keras.Variable(2.0)) == 2.0


def test_the_function_runs_in_the_thread_that_ctrl_c_reaches(module):
    """Another one's end may abort the process, once Python has ended."""
    import models_to_plan

    load_of_named(f"{module}:here")
    assert models_to_plan.threads == [threading.current_thread()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models_to_plan", "module:function"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("models_to_plan:failing", "failed in .*OSError: no such file"),
        ("models_to_plan:none", "no attribute 'none'"),
        ("models_to_plan:number", "not a function. Received: 3"),
        ("models_to_plan:unbuilt", "not built"),
        ("models_to_plan:text", "type str"),
    ],
)
def test_a_model_that_is_none_is_an_error(module, name, message):
    with pytest.raises(ValueError, match=message):
        load_of_named(name)


def test_an_optimizer_that_is_none_is_an_error(module):
    with pytest.raises(ValueError, match="Received: 'nosuch'"):
        load_of_named(f"{module}:build", "nosuch")


@pytest.mark.only_on(
    "jax", reason="PyTorch's workers can shard it, and TensorFlow nothing."
)
def test_an_optimizer_that_needs_whole_variables_is_an_error(module):
    with pytest.raises(UnsupportedModelError):
        load_of_named(f"{module}:muon", split="optimizer")


def test_the_command_shows_memory_traffic_and_others(invoke):
    result = invoke(
        *("--strategy", "mirrored", "--devices", "8"),
        *("--optimizer-state", "sharded"),
        *("--params", "7e9", "--dtype", "bfloat16"),
    )
    assert result.exit_code == 0, result.output
    text = result.output
    for part in (
        "7,000,000,000 parameters, bfloat16, adam, optimizer sharded",
        "device 0-7",
        "17.5 GB",
        "gradients, reduce-scatter",
        "12.2 GB",
        "196.0 GB",
        "Side by side",
        "central",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_options_become_a_plan(planned):
    content = planned("--params", "1000", "--devices", "4")
    assert content["plan"] == "mirrored"
    assert set(content["plans"]) == {
        "one device",
        "mirrored",
        "optimizer sharded",
        "variables sharded",
        "central",
    }
    sharded = content["plans"]["variables sharded"]
    assert sharded["memory"]["device 3"]["kept"] == 3008
    assert sharded["memory"]["device 3"]["gradients"] == 1000
    mirrored = content["plans"]["mirrored"]
    assert mirrored["memory"]["device 3"]["kept"] == 12008
    assert mirrored["bytes_sent"] == 2 * 3 * 4000
    central = content["plans"]["central"]["memory"]
    assert central["device 0"]["kept"] == 0
    assert central["parameter device"]["kept"] == 12008


def test_more_options_become_a_plan(planned):
    content = planned(
        *("--strategy", "multi-worker", "--workers", "3", "--devices", "2"),
        *("--params", "1k", "--optimizer", "sgd", "--activations", "1e3"),
    )
    found = content["plans"][content["plan"]]
    assert (found["workers"], found["devices"]) == (3, 2)
    assert found["memory"]["device 1"]["kept"] == 4008
    assert found["memory"]["device 1"]["in_a_step"] == 9008
    assert "central" not in content["plans"]
    content = planned(
        *("--strategy", "central", "--parameter-devices", "2"),
        *("--params", "1k", "--slots", "3"),
    )
    found = content["plans"]["central"]["memory"]
    assert found["parameter device 1"]["kept"] == 8004
    content = planned("--strategy", "one-device", "--params", "1k")
    assert content["plan"] == "one device"


def test_a_named_model_is_planned(module, planned):
    content = planned("--model", f"{module}:build", "--devices", "2")
    trainable = 4 * (5 * 7 + 7 + 2 * 7 + 7 * 3 + 3)
    assert content["load"]["trainable"] == trainable
    assert content["plans"]["mirrored"]["bytes_sent"] == 2 * trainable


def test_numbers_go_to_a_file_beside_the_tables(invoke, tmp_path):
    path = tmp_path / "plan.json"
    result = invoke("--params", "1k", "--json", str(path))
    assert result.exit_code == 0 and "Side by side" in result.output
    assert json.loads(path.read_text())["plan"] == "mirrored"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --params or --model"),
        (("--params", "1", "--model", "a:b"), "either --params or --model"),
        (("--params", "many"), "'many'"),
        (("--params", "0"), "'0'"),
        (("--params", "1e999"), "'1e999'"),
        (("--params", "1", "--dtype", "int3"), "'int3'"),
        (("--params", "1", "--optimizer", "muon"), "are not known"),
        (("--params", "1", "--activations", "some"), "20GiB"),
        (("--params", "1", "--backend", "mxnet"), "no backend 'mxnet'"),
        (("--params", "1", "--devices", "0"), "--devices"),
        (("--params", "1", "--strategy", "abacus"), "abacus"),
        (
            ("--params", "1", "--strategy", "one-device", "--devices", "2"),
            "computes on one",
        ),
        (("--params", "1", "--workers", "2"), "--strategy multi-worker"),
        (
            ("--params", "1", "--parameter-devices", "2"),
            "--strategy central",
        ),
        (
            (
                *("--params", "1", "--strategy", "central"),
                *("--optimizer-state", "sharded"),
            ),
            "has one copy",
        ),
        (
            (
                *("--params", "1", "--strategy", "central"),
                *("--variables", "sharded"),
            ),
            "--variables sharded",
        ),
        (
            (
                *("--params", "1", "--optimizer", "lamb"),
                *("--optimizer-state", "sharded"),
            ),
            "takes whole variables",
        ),
        (("--model", "a:b", "--dtype", "float32"), "has its own"),
        (("--model", "nothing"), "module:function"),
        (("--params", "1", "--json", "no/such/folder/x.json"), "folder"),
    ],
)
def test_bad_options_are_errors_that_say_so(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_data_builds_a_model(module, planned):
    found = planned("--model", f"{module}:with_data")
    assert found["load"]["trainable"] == 4 * (5 * 3 + 3)


def test_data_that_a_model_can_not_take_is_an_error(invoke, module):
    result = invoke("--model", f"{module}:with_other_data")
    assert result.exit_code == 2
    assert "the model, called on `x`, failed" in " ".join(result.stderr.split())


def test_what_a_function_prints_is_no_part_of_the_json(module, invoke):
    result = invoke("--model", f"{module}:talkative", "--json", "-")
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


def test_help_names_the_extra(invoke):
    assert "'targets'" in invoke("--help").output


def test_nothing_is_imported_to_count_parameters(tmp_path):
    code = (
        "import sys; from keras_dist.cli.main import app\n"
        "try: app(['plan', '--params', '7B'])\n"
        "except SystemExit as end: assert not end.code\n"
        "for name in 'keras', 'numpy', 'jax', 'torch':\n"
        "    assert name not in sys.modules, name\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        cwd=tmp_path,
        env={
            name: value
            for name, value in os.environ.items()
            if name != "KERAS_BACKEND"
        },
    )
