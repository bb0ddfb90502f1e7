"""`keras-dist plan --target` on PyTorch: one of many workers, simulated."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.only_on(
    "torch", reason="JAX compiles: test_plan_target.py."
)

MODELS = """
import keras


def dense(width, count, optimizer="sgd"):
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(count)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(optimizer, "mse")
    return model


def narrow():
    return dense(256, 4)


def huge():
    return dense(32_768, 2, "adam")


def scaled():
    keras.config.set_dtype_policy("mixed_float16")
    return dense(256, 2, "adam")


def mixed():
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [keras.layers.Dense(2048, use_bias=False) for _ in range(2)]
    layers.insert(1, keras.layers.LayerNormalization(center=False))
    model = keras.Sequential([keras.Input((2048,)), *layers])
    model.compile("sgd", "mse")
    return model


def random():
    model = keras.Sequential([
        keras.Input((256,)), keras.layers.Dense(256),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.5),
        keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def reading():
    def loss(y, outputs):
        value = keras.ops.mean(keras.ops.square(y - outputs))
        return value if float(value) > 0 else -value

    model = dense(256, 2)
    model.compile("sgd", loss)
    return model
"""


@pytest.fixture
def run(tmp_path):
    """Runs the command; returns its status, both outputs, and its memory."""
    (tmp_path / "models_to_plan.py").write_text(MODELS)

    def run(model, *options):
        command = [sys.executable, "-P", "-m", "keras_dist.cli", "plan"]
        command += ["--model", f"models_to_plan:{model}", *options]
        paths = os.pathsep.join([*sys.path, str(tmp_path)])
        with (tmp_path / "errors").open("w") as errors:
            process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        with process.stdout as stdout:
            output = stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors = (tmp_path / "errors").read_text()
        return process.returncode, output, errors, usage.ru_maxrss * 1024

    return run


@pytest.fixture
def planned(run):
    """What the command finds, and the bytes of memory that it took."""

    def planned(model, target, *options):
        status, output, errors, memory = run(
            *(model, "--target", target, "--variables", "sharded"),
            *("--json", "-", *options),
        )
        assert (status, errors) == (0, "")
        (program,) = json.loads(output)["programs"]
        return program, memory

    return planned


def test_the_figures_are_those_of_arithmetic(planned):
    program, _ = planned("narrow", "cpu:8", "--batch-size", "8")
    whole = 4 * 4 * 256 * 256  # bytes of four kernels
    assert program["is_simulated"]
    assert program["state"] == {
        "trainable": whole / 8,
        "non-trainable": 0,
        "optimizer": 8,  # the number of steps, and the learning rate
        "metrics": 8,
    }
    kinds = {each["kind"]: each for each in program["collectives"]}
    gathers, scatters = kinds["all-gather"], kinds["reduce-scatter"]
    assert set(kinds) == {"all-gather", "reduce-scatter"}
    # Each kernel in both passes, and the metrics of 8 workers.
    assert gathers["count"] == 2 * 4 + 1
    assert gathers["num_bytes"] == 2 * whole + 8 * 16
    assert (scatters["count"], scatters["num_bytes"]) == (4, whole)
    assert scatters["sent"] == whole * 7 / 8
    # A product for each kernel in each pass, and one for all inputs but the
    # first; each device has one row.
    assert program["flops"] == 2 * 256 * 256 * (4 + 4 + 3)
    assert program["batch"] == 2 * 8 * 256 * 4
    # At most: gradients in parts, and a kernel or two, with one's gradient.
    assert whole / 8 < program["temporary"] - whole / 2 < whole


def test_a_model_of_two_billion_parameters_takes_no_memory(planned):
    program, memory = planned("huge", "h100:64x8", "--batch-size", "512")
    count = 2 * 32_768**2
    assert count > 2e9
    assert program["devices"] == 512
    assert program["state"]["trainable"] == 4 * count / 512
    assert program["state"]["optimizer"] == 8 * count / 512 + 8
    # Both kernels are whole between the passes of the last layer.
    assert 4 * count < program["peak"] < 3 * 4 * count
    assert program["fits"]
    assert memory < 1.5e9 < 4 * count / 5


def test_gathers_are_in_the_dtype_that_layers_compute_in(planned):
    program, _ = planned("mixed", "cpu:8", "--batch-size", "8")
    kernels, scale = 2 * 2048**2, 2048
    kinds = {each["kind"]: each for each in program["collectives"]}
    # Normalization reads its scale in float32. Gradients are summed in float32.
    gathered = 2 * (2 * kernels + 4 * scale)
    assert 0 <= kinds["all-gather"]["num_bytes"] - gathered < 1000
    assert kinds["reduce-scatter"]["num_bytes"] == 4 * (kernels + scale)
    assert program["state"]["trainable"] == 4 * (kernels + scale) / 8


@pytest.mark.parametrize("model", ["scaled", "random"])
def test_steps_that_draw_numbers_or_choose(planned, model):
    program, _ = planned(model, "h100:8")
    assert program["fits"]


def test_people_read_that_it_is_simulated(run):
    status, output, errors, _ = run(
        "narrow", "--target", "h100:8", "--variables", "sharded"
    )
    words = " ".join(output.split())
    assert (status, errors) == (0, "")
    assert "32 rows a step, simulated on a device of h100:8" not in words
    assert "256 rows a step, simulated on a device of h100:8" in words
    assert "the step of the first of 8 devices" in words
    assert "Compiled" not in words and "JAX" not in words


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("narrow", ("h100:8",), "Expected: --variables sharded"),
        ("narrow", ("v5e:2x2", "--variables", "sharded"), "such as h100:8"),
        ("narrow", ("h100:1", "--variables", "sharded"), "on several devices"),
        (
            "reading",
            ("h100:8", "--variables", "sharded"),
            "reads a tensor's value",
        ),
        (
            "narrow",
            ("h100:8", "--variables", "sharded", "--strategy", "mirrored"),
            "with 8 workers. Choose --strategy multi-worker",
        ),
    ],
)
def test_what_can_not_be_simulated(run, model, options, words):
    status, _, errors, _ = run(model, "--target", *options)
    assert (status, words in " ".join(errors.split())) == (2, True), errors
