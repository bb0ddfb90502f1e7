"""What the logical devices of a replica send each other on accelerators."""

import json
import os
import subprocess
import sys

import pytest

from runs.runs import TESTS

TARGETS = ("h100:8", "v5e:2x4")
# A device's bytes of variables: its quarter of three, and all of the others.
STATE = 4 * ((256 * 1024 + 1024 + 1024 * 256) // 4 + 256 * 256 + 256 * 16 + 16)
# The rows of a replica, by the width that the pair of layers begins and ends
# with; TPUs send them as bfloat16.
ACTIVATIONS = 32 * 256


@pytest.fixture(scope="module")
def found():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-m", "compiled.logical", *TARGETS],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()[-len(TARGETS) :]
    return dict(zip(TARGETS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("way", ["fit", "function"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_pair_of_layers_sums_once_forward_and_once_backward(
    found, target, way
):
    program = found[target][way]
    among = {each["devices"]: each for each in program["collectives"]}
    assert {each["kind"] for each in program["collectives"]} == {"all-reduce"}
    assert len(program["collectives"]) == len(among) == 2
    replicas, logical = among[2], among[4]
    # Two replicas sum their gradients, each device those of its parts.
    assert replicas["count"] == 1
    assert replicas["num_bytes"] - STATE in (0, 4)  # and the loss
    assert logical["count"] == 2
    width = 2 if target.startswith("v5e") else 4
    assert logical["num_bytes"] == 2 * ACTIVATIONS * width


@pytest.mark.parametrize("target", TARGETS)
def test_each_device_has_its_part_of_the_state(found, target):
    fit, function = found[target]["fit"], found[target]["function"]
    assert fit["state"]["trainable"] == STATE
    assert fit["state"]["optimizer"] == 2 * STATE + 8
    assert function["state"]["variables"] == 3 * STATE + 8
    assert fit["flops"] == function["flops"]
    for program in (fit, function):
        assert program["aliased"] >= 3 * STATE
        assert program["to_host"] == 0
