"""`keras-dist plan --target` says for accelerators what a model needs."""

import json
import os
import subprocess
import sys

import pytest

from runs.runs import TESTS


def run_plan(*options):
    """Runs the command in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "plan", *options],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def plan(*options):
    """Runs the command; returns what it prints."""
    run = run_plan(*options)
    # What compilers log is left out.
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def planned(model, *options):
    spec = f"compiled.programs:{model}"
    return json.loads(plan("--model", spec, "--json", "-", *options))


@pytest.mark.parametrize("state", ["mirrored", "sharded"])
def test_compiled_and_computed_numbers_agree(state):
    found = planned("model", "--target", "h100:8", "--optimizer-state", state)
    (program,), computed = found["programs"], found["plans"][found["plan"]]
    kept = program["kept"] - program["state"]["metrics"]
    memory = computed["memory"]["device 0"]
    assert kept == pytest.approx(memory["kept"], rel=0.05)
    sent = sum(dict(each["sent"])["device 0"] for each in computed["transfers"])
    assert program["sent"] == pytest.approx(sent, rel=0.05)
    assert program["fits"]
    assert program["peak"] < found["memory"] == 84_942_979_072


def test_a_model_that_is_too_large_for_a_gpu():
    (program,) = planned("huge", "--target", "h100:1")["programs"]
    assert not program["fits"]
    assert program["state"]["trainable"] > 137e9
    assert program["peak"] >= program["kept"]


def test_a_model_that_is_too_large_for_a_tpu():
    text = plan("--model", "compiled.programs:huge", "--target", "v5e:2x2")
    words = " ".join(text.split())
    assert "It does not fit. The largest part that is known is 137.4" in words
    assert "The compiler says: RESOURCE_EXHAUSTED" in words
    assert "Trainable 137.4 GB" in words
    assert "Temporary values ?" in words


@pytest.mark.parametrize(
    "target",
    ["h100:8x8", pytest.param("v5e:16x16", marks=pytest.mark.nightly)],
)
def test_layers_in_a_scan_fit_many_devices(target):
    """69 billion parameters, of which a device has its parts and one layer."""
    options = "--target", target, "--variables", "sharded"
    (program,) = planned("scanned", *options)["programs"]
    whole = 1024 * 8192**2 * 4
    devices = program["devices"]
    assert program["fits"]
    assert program["state"]["trainable"] == whole / devices
    # Gradients in parts, and copies of a few layers.
    assert program["temporary"] < whole / 32


def test_keras_kernel_for_attention_is_used_on_one_tpu():
    """The kernel can't be divided over several TPUs."""
    of_a_step = {}
    for target in ("v5e:1x1", "v5e:2x2"):
        (program,) = planned(
            "attention", "--target", target, "--batch-size", "4"
        )["programs"]
        assert not program["refusal"]
        parts = ("kept", "batch", "padding", "outputs", "temporary")
        assert sum(program[part] for part in parts) == program["peak"]
        assert program["padding"] > 0  # TPUs pad small arrays
        of_a_step[target] = program["flops"] * program["devices"]
    # What the kernel computes is no product of the program.
    assert of_a_step["v5e:1x1"] < 0.8 * of_a_step["v5e:2x2"]


def test_flash_attention_on_several_tpus_is_refused():
    run = run_plan("--model", "compiled.programs:flash", "--target", "v5e:2x2")
    assert run.returncode == 2
    words = " ".join(run.stderr.split())
    assert "Received: flash_attention=True" in words
