"""`keras-dist plan --target`, for CPU devices, and what it refuses."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

import keras_dist
from keras_dist.cli.environment import CPU_ONLY
from keras_dist.cli.main import app
from keras_dist.planning.program_report import programs_json
from keras_dist.planning.programs import CompiledProgram
from keras_dist.planning.tables import bytes_text
from keras_dist.planning.targets import KINDS
from keras_dist.planning.targets import read_target
from keras_dist.plugin.backend import get_backend

BACKEND = keras.backend.backend()
ON_JAX = pytest.mark.only_on("jax", reason="Only JAX compiles for targets.")

MODELS = """
import keras
import numpy as np


def compiled(model, loss="mse", **options):
    model.compile("adam", loss, metrics=["mae"], **options)
    return model


def wide():
    return compiled(keras.Sequential([
        keras.Input((256,)), keras.layers.Dense(256),
        keras.layers.BatchNormalization(), keras.layers.Dense(8)]))


def paired():
    return compiled(
        keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(256, activation="relu", name="up"),
                keras.layers.Dense(64, name="down"),
            ]
        )
    )


def sparse():
    inputs = {"a": keras.Input((3,), name="a"),
              "b": keras.Input((2, 2), name="b")}
    joined = keras.layers.Concatenate()(
        [inputs["a"], keras.layers.Flatten()(inputs["b"])])
    outputs = [keras.layers.Dense(5, activation="softmax", name="c")(joined),
               keras.layers.Dense(2, name="d")(joined)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["sparse_categorical_crossentropy", "mse"])
    return model


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def with_data():
    return compiled(Own()), np.ones((2, 6)), np.ones((2, 3), "int64")


def without_sizes():
    return compiled(Own())


def open_sizes():
    inputs = keras.Input((None, 4))
    return compiled(keras.Model(inputs, keras.layers.Dense(2)(inputs)))


def named():
    inputs = keras.Input((3,))
    outputs = [keras.layers.Dense(5, activation="softmax", name="c")(inputs),
               keras.layers.Dense(2, name="d")(inputs)]
    model = keras.Model(inputs, outputs)
    sparse = keras.losses.SparseCategoricalCrossentropy(name="own")
    model.compile("sgd", {"c": sparse, "d": "mse"})
    return model


def without_loss():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.ActivityRegularization(0.1)(
        keras.layers.Dense(2)(inputs)))
    model.compile("sgd")
    return model


def with_weights():
    return wide(), np.ones((2, 256)), np.ones((2, 8)), np.ones(2)


def too_much():
    return *with_weights(), None


class Alone(Own):
    def call(self, x):
        y = super().call(x)
        self.add_loss(keras.ops.mean(y))
        return y


def alone():
    model = Alone()
    model.compile("sgd")
    return model, np.ones((2, 6))


def lamb():
    model = wide()
    model.compile(keras.optimizers.Lamb(), "mse")
    return model


def talkative():
    print("building")
    model = wide()
    model.summary()
    return model


def text_inputs():
    inputs = keras.Input((1,), dtype="string")
    hashed = keras.layers.Lambda(lambda x: x, output_shape=(3,), dtype="int32")
    return compiled(keras.Model(inputs, keras.layers.Dense(2)(hashed(inputs))))


def augmented():
    return compiled(keras.Sequential([
        keras.Input((8, 8, 3)), keras.layers.RandomRotation(0.1),
        keras.layers.Flatten(), keras.layers.Dense(2)]))


def predicted():
    model = wide()
    model.predict(np.ones((4, 256)), verbose=0)
    return model


def of_lists():
    return wide(), [[1.0] * 256], [[1.0] * 8]


def of_text():
    return wide(), np.array(["a", "b"]), np.ones((2, 8))


def trained():
    model = wide()
    model.train_on_batch(np.ones((4, 256)), np.ones((4, 8)))
    return model


def own_strategy():
    import keras_dist
    with keras_dist.MirroredStrategy(["cpu:0"]).scope():
        return wide()


def wrong_labels():
    return compiled(Own()), np.ones((2, 6)), np.ones((2, 7))


def eager():
    model = wide()
    return compiled(model, run_eagerly=True)


def uncompiled():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
"""


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Runs the command in this process."""
    (tmp_path / "models_for_targets.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (*CPU_ONLY, "KERAS_BACKEND"):
        # What the command sets is set back.
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    yield lambda *options: CliRunner().invoke(
        app, ["plan", "--backend", BACKEND, *options]
    )
    sys.modules.pop("models_for_targets", None)


@pytest.fixture
def planned(invoke):
    """What the command finds, as JSON."""

    def run(model, *options):
        result = invoke(
            *("--model", f"models_for_targets:{model}", "--json", "-"),
            *options,
        )
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def refused(invoke):
    """The message of a command that ends with an error."""

    def run(*options):
        result = invoke(*options)
        assert result.exit_code == 2, result.output
        return " ".join(result.stderr.split())

    return run


STRATEGIES = {
    "one-device": ("one device", "cpu:4", ()),
    "mirrored": ("mirrored", "cpu:4", ()),
    "sharded": ("optimizer sharded", "cpu:4", ("--optimizer-state", "sharded")),
    "variables": ("variables sharded", "cpu:4", ("--variables", "sharded")),
    "multi-worker": ("mirrored", "cpu:2x2", ()),
}


@ON_JAX
@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_and_computed_numbers_agree(planned, name):
    key, target, options = STRATEGIES[name]
    if name == "one-device":
        options = ("--strategy", "one-device")
    found = planned("wide", "--target", target, "--batch-size", "40", *options)
    (program,) = found["programs"]
    plan = found["plans"][key]
    assert found["plan"] == key
    memory = plan["memory"]["device 0"]
    metrics = program["state"]["metrics"]
    kept = program["kept"] - metrics
    assert kept == pytest.approx(memory["kept"], rel=0.05)
    assert program["devices"] == plan["devices"] * plan["workers"]
    count = program["devices"]
    # Without the statistics of normalization. On CPUs, gradients of sharded
    # variables are summed whole, which is half more.
    sent = 2 * (count - 1) / count * found["load"]["trainable"]
    times = 1.5 if name in ("sharded", "variables") else 1
    assert program["sent"] == pytest.approx(times * sent, rel=0.05)
    assert program["aliased"] >= program["kept"] - 8
    assert program["to_host"] == 0 and program["fits"] is None


@ON_JAX
def test_central_storage_has_a_program_for_the_update(planned):
    step, update = planned(
        "wide", "--target", "cpu:4", "--strategy", "central"
    )["programs"]
    assert (step["name"], update["name"]) == ("train_step", "optimizer_update")
    assert (step["devices"], update["devices"]) == (4, 1)
    # Variables come to the devices, and gradients go. Nothing is counted as
    # kept: the first device keeps the variables, but for the update.
    trained = 4 * (256 * 256 + 256 + 2 * 256 + 256 * 8 + 8)
    statistics = 4 * 2 * 256
    assert step["kept"] == 0
    assert set(step["received"]) == {"copies of variables"}
    copied = step["received"]["copies of variables"] - trained - statistics
    assert 0 <= copied < 100  # metrics and the seed
    assert update["received"] == {"gradients": trained}
    assert update["kept"] == pytest.approx(3 * trained, abs=100)


@ON_JAX
@pytest.mark.parametrize("rows", [None, 41])
def test_more_rows_are_more_work(planned, rows):
    options = () if rows is None else ("--batch-size", str(rows))
    found = planned("wide", "--target", "cpu:4", *options)
    rows = rows or 32 * 4
    # Forward, and backward for each kernel and for the second one's inputs.
    work = 2 * (2 * 256 * 256 + 3 * 256 * 8) * rows // 4
    assert found["programs"][0]["flops"] == pytest.approx(work, rel=0.02)


@ON_JAX
def test_fewer_rows_than_devices_are_on_each(planned):
    found = planned("wide", "--target", "cpu:4", "--batch-size", "2")
    (program,) = found["programs"]
    assert program["batch"] == 2 * 4 * (256 + 8)
    work = 2 * (2 * 256 * 256 + 3 * 256 * 8) * 2
    assert program["flops"] == pytest.approx(work, rel=0.02)


@ON_JAX
@pytest.mark.parametrize(
    "model",
    [
        *("sparse", "with_data", "named", "without_loss", "with_weights"),
        *("alone", "talkative"),
    ],
)
def test_batches_are_described_for_each_kind_of_model(planned, model):
    found = planned(model, "--target", "cpu:2", "--batch-size", "10")
    sizes = {
        "sparse": 3 * 4 + 4 * 4 + 4 + 2 * 4,  # a row's inputs and labels
        "with_data": 6 * 4 + 3 * 4,
        "named": 3 * 4 + 4 + 2 * 4,
        "without_loss": 3 * 4,
        "with_weights": (256 + 8 + 1) * 4,
        "alone": 6 * 4,
        "talkative": (256 + 8) * 4,
    }
    assert found["programs"][0]["batch"] == 5 * sizes[model]


@ON_JAX
def test_nothing_is_left_behind(planned):
    def trained():
        keras.utils.set_random_seed(0)
        with keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((6, 2)), np.ones((6, 1)), verbose=0)
        return model.get_weights()

    before = trained()
    workers = get_backend()._workers
    planned("wide", "--target", "cpu:2x2")
    assert get_backend()._workers is workers
    for got, want in zip(trained(), before, strict=True):
        np.testing.assert_array_equal(got, want)


@ON_JAX
def test_tables_say_what_the_json_has(invoke, planned):
    result = invoke("--model", "models_for_targets:wide", "--target", "cpu:4")
    assert result.exit_code == 0, result.output
    found = planned("wide", "--target", "cpu:4")["programs"][0]
    (collective,) = found["collectives"]
    for words in (
        "compiled for cpu:4",
        "train_step: memory 4 x cpu",
        f"Trainable {bytes_text(found['state']['trainable'])}",
        f"At most {bytes_text(found['peak'])}",
        f"all-reduce 4 {collective['count']} "
        f"{bytes_text(collective['num_bytes'])}",
        f"{found['flops']:.3g} floating-point operations",
        "Compiled in",
        "`fit` keeps up to",
    ):
        assert words in " ".join(result.stdout.split())


@ON_JAX
@pytest.mark.parametrize(
    "model, words",
    [
        ("uncompiled", "Received: a model without an optimizer"),
        ("without_sizes", "the size of a batch is not known"),
        ("open_sizes", "shapes [(None, None, 4)]"),
        ("wrong_labels", "a batch of shapes [(64, 6), (64, 7)]"),
        ("too_much", "the wrong number of values"),
        ("text_inputs", "no arrays of text"),
        ("augmented", "layers that Keras does not compile: 'random_rotation"),
        ("predicted", "neither trains nor runs it"),
        ("of_lists", "`x` can't be read as a batch"),
        ("of_text", "`x` can't be read as a batch"),
        ("trained", "neither trains nor runs it"),
        ("own_strategy", "the function makes a strategy"),
        ("eager", "there is nothing to compile"),
    ],
)
def test_models_that_can_not_be_compiled(refused, model, words):
    spec = f"models_for_targets:{model}"
    assert words in refused("--model", spec, "--target", "cpu:2")


@ON_JAX
def test_the_users_line_is_named_and_not_one_of_keras_dist(refused):
    words = refused(
        *("--model", "models_for_targets:lamb", "--target", "cpu:2"),
        *("--optimizer-state", "sharded"),
    )
    assert "models_for_targets.py, line" in words
    assert "norms of each whole variable" in words


@pytest.mark.runs_on("torch")
@pytest.mark.parametrize(
    "options, words",
    [
        (("--target", "h100:8"), "Say which one with --model"),
        (("--target", "h300:8"), "there is no such target"),
        (("--target", "h100"), "there is no such target"),
        (("--target", "h100:2x2x2"), "devices, or hosts x devices"),
        (("--target", "v5e:8"), "there is no such slice of TPU v5e"),
        (("--target", "v5e:4x2"), "one of 1x1, 2x2, 2x4, 4x4"),
        (("--target", "v5e:2x2x2"), "there is no such slice"),
        (("--target", "v5p:4x4"), "three multiples of 4"),
        (("--target", "v5p:2x2x3"), "there is no such slice"),
        (("--target", "v4:8x4x4"), "the smallest first"),
        (("--target", "cpu:2", "--backend", "mxnet"), "no backend 'mxnet'"),
        (("--target", "cpu:200x200"), "too many devices"),
        (("--target", "cpu:2", "--devices", "3"), "Leave --devices out"),
        (("--target", "cpu:2", "--params", "7e9"), "Leave --params out"),
        (("--target", "cpu:2", "--parameter-devices", "2"), "a target has one"),
        (("--params", "9", "--batch-size", "3"), "it is for --target"),
        (("--params", "9", "--logical-devices", "2"), "it is for --target"),
    ],
)
def test_options_that_do_not_go_together(refused, options, words):
    if "--target" in options and "--model" not in words:
        options = ("--model", "models_for_targets:wide", *options)
    assert words in refused(*options)


LAYOUTS = {".*up/kernel": [None, "logical"], ".*down/kernel": ["logical", None]}


@pytest.fixture
def layout_map(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps(LAYOUTS))
    return path


@ON_JAX
@pytest.mark.parametrize("count", [2, 4])
def test_logical_devices(planned, layout_map, count):
    """The activations of a pair are summed once each way, in a replica."""
    options = ("--target", "cpu:4", "--batch-size", "8")
    logical = ("--logical-devices", str(count), "--layout-map", str(layout_map))
    (whole,) = planned("paired", *options)["programs"]
    found = planned("paired", *options, *logical)
    (program,) = found["programs"]
    assert "plans" not in found and found["load"]["trainable"] == 4 * 33_088
    assert whole["state"]["trainable"] == 4 * 33_088
    kernels = 4 * 2 * 64 * 256
    assert program["state"]["trainable"] == 4 * 320 + kernels / count
    moved = sum(each["num_bytes"] for each in program["collectives"])
    # What `down` gives for the rows of a replica, and with two replicas the
    # gradients of the parts.
    activations = 8 * 64 * 4 * count // 4
    gradients = 4 * 320 + kernels / count if count == 2 else 0
    assert activations <= moved - gradients <= 2 * activations


@ON_JAX
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_logical_devices_of_several_hosts(planned, layout_map, variables):
    """The program is that of one host with as many devices."""
    options = ("--batch-size", "8", "--variables", variables)
    options += ("--logical-devices", "2", "--layout-map", str(layout_map))
    (hosts,) = planned("paired", "--target", "cpu:2x2", *options)["programs"]
    (host,) = planned("paired", "--target", "cpu:4", *options)["programs"]
    assert hosts["state"] == host["state"]
    assert hosts["collectives"] == host["collectives"]
    kernels, biases = 2 * 64 * 256 // 2, 320
    if variables == "sharded":
        kernels //= 2
    assert hosts["state"]["trainable"] == 4 * (kernels + biases)


@ON_JAX
@pytest.mark.parametrize(
    "options, words",
    [
        (("--logical-devices", "3"), "a multiple of 3 devices"),
        (("--layout-map", "map.json"), "`logical_devices=n` too"),
        (
            ("--logical-devices", "2", "--layout-map", "bad.json"),
            "it has no layouts",
        ),
        (
            ("--logical-devices", "2", "--strategy", "one-device"),
            "Received: --strategy one-device",
        ),
        (
            ("--logical-devices", "2", "--layout-map", "other.json"),
            "names no variable",
        ),
    ],
)
def test_logical_devices_that_can_not_be(
    refused, layout_map, monkeypatch, options, words
):
    layout_map.with_name("bad.json").write_text("[1]")
    layout_map.with_name("other.json").write_text('{"x/kernel": ["logical"]}')
    monkeypatch.chdir(layout_map.parent)
    model = ("--model", "models_for_targets:paired", "--target", "cpu:4")
    assert words in refused(*model, *options)


@ON_JAX
def test_a_strategy_with_one_worker_on_several_hosts(refused):
    words = refused(
        *("--model", "models_for_targets:wide", "--target", "cpu:2x2"),
        *("--strategy", "mirrored"),
    )
    assert "with 2 workers. Choose --strategy multi-worker" in words


@ON_JAX
def test_a_compiler_that_is_not_installed(refused, monkeypatch):
    from keras_dist_jax.targets import topologies

    monkeypatch.setattr(topologies, "find_spec", lambda name: None)
    spec = ("--model", "models_for_targets:wide")
    for target in ("h100:8", "v5e:4x4"):
        words = refused(*spec, "--target", target)
        assert "pip install 'keras-dist[targets]'" in words


@pytest.mark.only_on("tensorflow", "torch", reason="JAX takes targets.")
def test_other_backends_say_which_one_compiles(refused):
    spec = ("--model", "models_for_targets:wide")
    words = refused(*spec, "--target", "h100:8")
    assert f"Received: the backend '{BACKEND}'" in words
    assert "Expected: --backend jax. Or leave --target out" in words


@pytest.mark.runs_on("torch")
def test_kinds_are_listed_without_a_framework():
    code = (
        "import sys\n"
        "from keras_dist.cli.main import app\n"
        "try:\n"
        "    app(['plan', '--target', 'list'])\n"
        "finally:\n"
        "    print({'jax', 'keras', 'torch', 'tensorflow'} & {*sys.modules})\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    *table, modules = run.stdout.splitlines()
    assert modules == "set()"
    for kind in KINDS:
        assert any(line.startswith(kind) for line in table)


@pytest.mark.runs_on("torch")
def test_json_has_null_for_what_the_compiler_did_not_say():
    program = CompiledProgram(
        "step", 8, False, {"a": 5}, {}, 3, 70, refusal="no"
    )
    (found,) = programs_json(read_target("v5e:2x4"), [program])["programs"]
    assert (found["kept"], found["batch"], found["flops"]) == (5, 3, 70)
    assert found["fits"] is False
    for name in ("peak", "temporary", "collectives", "sent", "to_host"):
        assert found[name] is None


@pytest.mark.runs_on("torch")
@pytest.mark.parametrize(
    "text, name",
    [
        ("h100:8", "h100:8"),
        ("h100:1x8", "h100:8"),
        ("H100:4x8", "h100:4x8"),
        (" v5e:16x16 ", "v5e:16x16"),
        ("v5p:2x2x2", "v5p:2x2x2"),
        ("tpu7x:4x4x8", "tpu7x:4x4x8"),
        ("v5p:1x1x1", "v5p:1x1x1"),
        ("cpu:3", "cpu:3"),
    ],
)
def test_targets_are_read_as_people_write_them(text, name):
    assert str(read_target(text)) == name


@pytest.mark.runs_on("torch")
def test_log_information_is_held_back_and_nothing_else():
    code = (
        "import os, sys\n"
        "from keras_dist.cli.log_noise import without_log_noise\n"
        "with without_log_noise():\n"
        "    print('from Python', file=sys.stderr)\n"
        "    os.write(2, b'I0000 00:00:1.5 7 a.cc:31] information\\n')\n"
        "    os.write(2, b'E0000 00:00:1.5 7 b.cc:9] an error\\n')\n"
        "    os.write(2, b'Illegal instruction\\n')\n"
        "    if sys.argv[1] == 'abort':\n"
        "        os.abort()\n"
        "print('after', file=sys.stderr)\n"
    )
    for way, last in (("end", ["after"]), ("abort", [])):
        run = subprocess.run(
            [sys.executable, "-c", code, way],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (run.returncode == 0) == (way == "end")
        assert run.stderr.splitlines() == [
            "from Python",
            "E0000 00:00:1.5 7 b.cc:9] an error",
            "Illegal instruction",
            *last,
        ]
