"""`keras-dist plan --target` compiles a model's step for other devices."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.planning.program_report import programs_json
from keras_dist.planning.programs import CompiledProgram
from keras_dist.planning.tables import bytes_text
from keras_dist.planning.targets import KINDS
from keras_dist.planning.targets import read_target
from keras_dist.plugin.backend import get_backend

BACKEND = keras.backend.backend()
ON_JAX = pytest.mark.only_on("jax", reason="Only JAX compiles for targets.")
ON_TORCH = pytest.mark.runs_on("torch")
LAYOUTS = (
    '{".*up/kernel": [null, "logical"], ".*down/kernel": ["logical", null]}'
)


def line(model, options):
    return f"plan --model models_to_plan:{model} --target {options}"


@pytest.fixture
def planned(invoke):
    """What the command finds, as JSON."""

    def run(model, options):
        result = invoke(f"{line(model, options)} --json -")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


STRATEGIES = {
    "one device": "cpu:4 --strategy one-device",
    "mirrored": "cpu:4",
    "optimizer sharded": "cpu:4 --optimizer-state sharded",
    "variables sharded": "cpu:4 --variables sharded",
    "mirrored on workers": "cpu:2x2",
}


@ON_JAX
@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_and_computed_numbers_agree(planned, name):
    found = planned("wide", f"{STRATEGIES[name]} --batch-size 40")
    (program,) = found["programs"]
    assert found["plan"] == name.removesuffix(" on workers")
    plan = found["plans"][found["plan"]]
    memory = plan["memory"]["device 0"]
    kept = program["kept"] - program["state"]["metrics"]
    assert kept == pytest.approx(memory["kept"], rel=0.05)
    count = program["devices"]
    assert count == plan["devices"] * plan["workers"]
    # Without the statistics of normalization. On CPUs, gradients of sharded
    # variables are summed whole, which is half more.
    sent = 2 * (count - 1) / count * found["load"]["trainable"]
    times = 1.5 if "sharded" in name else 1
    assert program["sent"] == pytest.approx(times * sent, rel=0.05)
    assert program["aliased"] >= program["kept"] - 8
    assert program["to_host"] == 0 and program["fits"] is None


@ON_JAX
def test_central_storage_has_a_program_for_the_update(planned):
    step, update = planned("wide", "cpu:4 --strategy central")["programs"]
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
@pytest.mark.parametrize(
    ("options", "rows"),
    # Fewer rows than devices are on each.
    [("", 32 * 4), (" --batch-size 41", 41), (" --batch-size 2", 2 * 4)],
)
def test_more_rows_are_more_work(planned, options, rows):
    (program,) = planned("wide", f"cpu:4{options}")["programs"]
    # Forward, and backward for each kernel and for the second one's inputs.
    work = 2 * (2 * 256 * 256 + 3 * 256 * 8) * rows // 4
    assert program["flops"] == pytest.approx(work, rel=0.02)
    if rows == 8:
        assert program["batch"] == 2 * 4 * (256 + 8)


# Of a row's inputs and labels.
SIZES = {
    "sparse": 3 * 4 + 4 * 4 + 4 + 2 * 4,
    "with_data": 6 * 4 + 3 * 4,
    "named": 3 * 4 + 4 + 2 * 4,
    "without_loss": 3 * 4,
    "with_weights": (256 + 8 + 1) * 4,
    "alone": 6 * 4,
    "talkative": (256 + 8) * 4,
}


@ON_JAX
@pytest.mark.parametrize("model", SIZES)
def test_batches_are_described_for_each_kind_of_model(planned, model):
    found = planned(model, "cpu:2 --batch-size 10")
    assert found["programs"][0]["batch"] == 5 * SIZES[model]


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
    planned("wide", "cpu:2x2")
    assert get_backend()._workers is workers
    for got, want in zip(trained(), before, strict=True):
        np.testing.assert_array_equal(got, want)


@ON_JAX
def test_tables_say_what_the_json_has(invoke, planned):
    result = invoke(line("wide", "cpu:4"))
    assert result.exit_code == 0, result.output
    found = planned("wide", "cpu:4")["programs"][0]
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
    ("model", "options", "words"),
    [
        ("uncompiled", "", "Received: a model without an optimizer"),
        ("without_sizes", "", "the size of a batch is not known"),
        ("open_sizes", "", "shapes [(None, None, 4)]"),
        ("wrong_labels", "", "a batch of shapes [(64, 6), (64, 7)]"),
        ("too_much", "", "the wrong number of values"),
        ("text_inputs", "", "no arrays of text"),
        ("augmented", "", "that Keras does not compile: 'random_rotation"),
        ("predicted", "", "neither trains nor runs it"),
        ("of_lists", "", "`x` can't be read as a batch"),
        ("of_text", "", "`x` can't be read as a batch"),
        ("trained", "", "neither trains nor runs it"),
        ("own_strategy", "", "the function makes a strategy"),
        ("eager", "", "there is nothing to compile"),
        # The user's line is named, and not one of keras_dist.
        ("lamb", "--optimizer-state sharded", "models_to_plan.py, line"),
        ("lamb", "--optimizer-state sharded", "norms of each whole variable"),
        ("wide", "--logical-devices 3", "a multiple of 3 devices"),
        ("wide", "--layout-map map.json", "`logical_devices=n` too"),
        (
            *("wide", "--logical-devices 2 --layout-map bad.json"),
            "it has no layouts",
        ),
        (
            *("wide", "--logical-devices 2 --strategy one-device"),
            "Received: --strategy one-device",
        ),
        (
            *("paired", "--logical-devices 2 --layout-map other.json"),
            "names no variable",
        ),
        # One worker, for several hosts.
        ("wide", "--target cpu:2x2 --strategy mirrored", "--strategy multi-w"),
    ],
)
def test_what_can_not_be_compiled(
    refused, monkeypatch, tmp_path, model, options, words
):
    (tmp_path / "map.json").write_text(LAYOUTS)
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"x/kernel": ["logical"]}')
    monkeypatch.chdir(tmp_path)
    assert words in refused(f"{line(model, 'cpu:2')} {options}")


@ON_JAX
def test_a_compiler_that_is_not_installed(refused, monkeypatch):
    from keras_dist_jax.targets import topologies

    monkeypatch.setattr(topologies, "find_spec", lambda name: None)
    for target in ("h100:8", "v5e:4x4"):
        told = refused(line("wide", target))
        assert "pip install 'keras-dist[targets]'" in told


@pytest.fixture
def logical(tmp_path):
    """Returns the options of logical devices."""
    path = tmp_path / "map.json"
    path.write_text(LAYOUTS)
    return lambda count: f" --logical-devices {count} --layout-map {path}"


@ON_JAX
@pytest.mark.parametrize("count", [2, 4])
def test_logical_devices(planned, logical, count):
    """The activations of a pair are summed once each way, in a replica."""
    options = "cpu:4 --batch-size 8"
    (whole,) = planned("paired", options)["programs"]
    found = planned("paired", options + logical(count))
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
def test_logical_devices_of_several_hosts(planned, logical, variables):
    """The program is that of one host with as many devices."""
    options = f"--batch-size 8 --variables {variables}" + logical(2)
    (hosts,) = planned("paired", f"cpu:2x2 {options}")["programs"]
    (host,) = planned("paired", f"cpu:4 {options}")["programs"]
    assert hosts["state"] == host["state"]
    assert hosts["collectives"] == host["collectives"]
    kernels, biases = 2 * 64 * 256 // 2, 320
    if variables == "sharded":
        kernels //= 2
    assert hosts["state"]["trainable"] == 4 * (kernels + biases)


@pytest.mark.only_on("tensorflow", "torch", reason="JAX takes targets.")
def test_other_backends_say_which_one_compiles(refused):
    words = refused(line("wide", "h100:8"))
    assert f"Received: the backend '{BACKEND}'" in words
    assert "Expected: --backend jax. Or leave --target out" in words


@ON_TORCH
def test_kinds_are_listed(invoke):
    table = invoke("plan --target list").stdout.splitlines()
    for kind in KINDS:
        assert any(shown.startswith(kind) for shown in table)


@ON_TORCH
def test_json_has_null_for_what_the_compiler_did_not_say():
    program = CompiledProgram(
        "step", 8, False, {"a": 5}, {}, 3, 70, refusal="no"
    )
    (found,) = programs_json(read_target("v5e:2x4"), [program])["programs"]
    assert (found["kept"], found["batch"], found["flops"]) == (5, 3, 70)
    assert found["fits"] is False
    for name in ("peak", "temporary", "collectives", "sent", "to_host"):
        assert found[name] is None


@ON_TORCH
def test_targets_are_read_as_people_write_them():
    for name in ("h100:8", "v5p:2x2x2", "tpu7x:4x4x8", "v5p:1x1x1", "cpu:3"):
        assert str(read_target(name)) == name
    assert str(read_target("h100:1x8")) == "h100:8"
    assert str(read_target("H100:4x8")) == "h100:4x8"
    assert str(read_target(" v5e:16x16 ")) == "v5e:16x16"


@ON_TORCH
@pytest.mark.parametrize(("way", "last"), [("end", ["after"]), ("abort", [])])
def test_log_information_is_held_back_and_nothing_else(way, last):
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
