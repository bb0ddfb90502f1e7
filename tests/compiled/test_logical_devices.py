"""A replica's logical devices send each other two sums a step."""

import pytest

from compiled.conftest import found_by

TARGETS = ("h100:8", "v5e:2x4")
WAYS = ("fit", "function")
# A device's bytes of variables: its quarter of some, and all of the others.
AROUND = 256 * 256 + 256 * 16 + 16
STATE = {
    "pair": 4 * ((256 * 1024 + 1024 + 1024 * 256) // 4 + AROUND),
    "attention": 4 * (4 * 256 * 512 // 4 + AROUND),
}
# Elements of a replica's rows, as wide as the layers begin and end.
ROWS = {"pair": 32 * 256, "attention": 32 * 128 * 256}


@pytest.fixture(scope="module")
def found():
    return found_by("compiled.logical", TARGETS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STATE)
@pytest.mark.parametrize("target", TARGETS)
def test_layers_sum_once_forward_and_once_backward(found, target, kind, way):
    program = found[target][kind][way]
    among = {each["devices"]: each for each in program["collectives"]}
    assert {each["kind"] for each in program["collectives"]} == {"all-reduce"}
    assert len(program["collectives"]) == len(among) == 2
    replicas, logical = among[2], among[4]
    # Two replicas sum their gradients, each device those of its parts.
    assert replicas["count"] == 1
    assert replicas["num_bytes"] - STATE[kind] in (0, 4)  # and the loss
    assert logical["count"] == 2
    # TPUs send some of them as bfloat16.
    least = 2 if target.startswith("v5e") else 4
    sent = logical["num_bytes"] / (2 * ROWS[kind])
    assert least <= sent <= 4


@pytest.mark.parametrize("kind", STATE)
@pytest.mark.parametrize("target", TARGETS)
def test_each_device_has_its_part_of_the_state(found, target, kind):
    fit, function = (found[target][kind][way] for way in WAYS)
    state = STATE[kind]
    assert fit["state"]["trainable"] == state
    assert fit["state"]["optimizer"] == 2 * state + 8
    assert function["state"]["variables"] == 3 * state + 8
    assert fit["flops"] == function["flops"]
    for program in (fit, function):
        assert program["aliased"] >= 3 * state
        assert program["to_host"] == 0
