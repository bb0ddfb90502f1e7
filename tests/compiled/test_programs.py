"""Steps that are compiled for accelerators send and keep no more than due."""

import pytest

from compiled.conftest import TARGETS

NUM_BLOCKS = 8  # of `compiled.programs`

# The model of `compiled.programs`: its trained variables, the statistics of
# its normalization, and the values that an optimizer and metrics count with.
TRAINED, STATISTICS, FEW = 538_664, 2_048, 32
SLOTS = 2 * TRAINED
# Normalization meets three times, and the loss and metrics once.
SMALL = 8_192


def bytes_of(program):
    """The bytes of a program's collectives, by kind."""
    found = {}
    for each in program["collectives"]:
        kind = each["kind"]
        found[kind] = found.get(kind, 0) + each["num_bytes"]
    return found


def counts_of(program):
    return {each["kind"]: each["count"] for each in program["collectives"]}


def ways(programs, *kinds):
    """Each program on the target's devices, with a name for messages."""
    for kind in kinds or programs:
        for way, made in programs[kind].items():
            yield f"{kind}, {way}", made[0]


@pytest.mark.parametrize("target", TARGETS)
def test_no_step_talks_to_the_host_and_all_devices_run_it(compiled, target):
    devices, programs = compiled(target)
    for name, program in ways(programs):
        assert not program["refusal"], name
        assert program["to_host"] == 0, name
        expected = 1 if name.startswith("one device") else devices
        assert program["devices"] == expected, name
        assert not program["on_host"], name


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x2"])
def test_a_step_is_compiled_as_keras_traces_it(is_own, target):
    assert is_own(target)


@pytest.mark.parametrize("target", TARGETS)
def test_new_values_take_the_place_of_old_ones(compiled, target):
    """Not in functions of several workers, of which one may be lost."""
    _, programs = compiled(target)
    has_workers = "one device" not in programs
    for name, program in ways(programs):
        if name == "central, fit":  # gives gradients for the variables
            continue
        if has_workers and "fit" not in name:
            continue
        state = sum(program["state"].values())
        # The learning rate is only read.
        assert program["aliased"] >= state - FEW, name
        assert program["outputs"] < SMALL, name


@pytest.mark.parametrize("target", TARGETS)
def test_each_device_has_the_state_that_the_strategy_says(compiled, target):
    devices, programs = compiled(target)
    whole = programs["mirrored"]["fit"][0]["state"]
    assert whole["trainable"] == TRAINED
    assert whole["non-trainable"] == STATISTICS
    assert 0 <= whole["optimizer"] - SLOTS <= FEW
    parts = programs["sharded"]["fit"][0]["state"]
    # Axes that the devices don't divide are padded.
    assert parts["optimizer"] == pytest.approx(SLOTS / devices, rel=0.01)
    assert parts | {"optimizer": 0} == whole | {"optimizer": 0}


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_travel_once_and_nothing_else_does(compiled, target):
    _, programs = compiled(target)
    for name, program in ways(programs, "mirrored"):
        sent = bytes_of(program)
        steps = 3 if name.endswith("scan") else 1
        assert sent.keys() == {"all-reduce"}, name
        extra = sent["all-reduce"] - steps * TRAINED
        assert 0 <= extra <= steps * SMALL, name
        # A function normalizes the rows of each replica, and `fit` all rows.
        most = 6 if "fit" in name else steps
        assert counts_of(program)["all-reduce"] <= most, name


@pytest.mark.parametrize("target", TARGETS)
def test_a_sharded_state_is_updated_where_it_is(compiled, target):
    _, programs = compiled(target)
    for _, program in ways(programs, "sharded"):
        check_sharded_state(target, bytes_of(program))


def check_sharded_state(target, sent):
    """Checks what a step sends, if the optimizer's state is in parts."""
    if target.startswith("v5e"):
        # For so small a model, the compiler for TPUs mostly prefers an
        # all-reduce, with few rows of each variable on a device even twice.
        total = sum(sent.values())
        assert sent.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
        assert total == pytest.approx(2 * TRAINED, rel=0.04)
        return
    assert sent.pop("reduce-scatter") == pytest.approx(TRAINED, rel=0.02)
    # Each device sends the parts of the variables that it has updated.
    assert sent.pop("all-gather") == pytest.approx(TRAINED, rel=0.02)
    assert sent.pop("all-reduce") < SMALL
    assert not sent


# Of three kernels; biases and the normalization's vectors are small.
LARGE = 4 * (2 * 256 * 256 + 256 * 10)


@pytest.mark.parametrize("target", TARGETS)
def test_each_device_has_its_part_of_large_variables(compiled, target):
    devices, programs = compiled(target)
    whole = programs["mirrored"]["fit"][0]["state"]
    parts = programs["sharded variables"]["fit"][0]["state"]
    for name, copies in (("trainable", 1), ("optimizer", 2)):
        saved = copies * LARGE * (1 - 1 / devices)
        # An axis that the devices don't divide is padded.
        padding = 0.01 * copies * LARGE
        assert 0 <= parts[name] - (whole[name] - saved) <= padding
    assert parts["non-trainable"] == whole["non-trainable"]


@pytest.mark.parametrize("target", TARGETS)
def test_large_variables_are_gathered_and_their_gradients_scattered(
    compiled, target
):
    _, programs = compiled(target)
    for _, program in ways(programs, "sharded variables"):
        check_sharded_variables(target, bytes_of(program))


def check_sharded_variables(target, sent):
    """Checks what a step sends, if large variables are in parts."""
    if target.startswith("v5e"):
        # For so small a model, the compiler for TPUs mostly prefers an
        # all-reduce, on 256 devices even to gather.
        assert sent.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
        assert LARGE < sum(sent.values()) < 2 * LARGE + 3 * SMALL
        return
    assert sent.pop("all-gather") == pytest.approx(LARGE, rel=0.02)
    assert sent.pop("reduce-scatter") == pytest.approx(LARGE, rel=0.02)
    assert sent.pop("all-reduce") < 2 * SMALL
    assert not sent


def test_tpus_gather_in_the_dtype_that_they_multiply_in(compiled):
    _, programs = compiled("v5e:2x2")
    sent = bytes_of(programs["wide, sharded variables"]["fit"][0])
    large = 4 * 3 * 1024**2
    assert sent.pop("all-gather") == pytest.approx(large / 2, rel=0.01)
    assert sent.pop("reduce-scatter") == pytest.approx(large, rel=0.01)
    assert sent.pop("all-reduce") < 2 * SMALL
    assert not sent


def test_recurrent_layers_gather_before_their_loops(compiled):
    _, programs = compiled("h100:8")
    sent = bytes_of(programs["recurrent"]["fit"][0])
    # Kernels of an LSTM and a GRU; and biases, of which some are large.
    large, most = 4 * 14 * 256**2, 4 * (14 * 256**2 + 10 * 256)
    assert large <= sent["all-gather"] <= most
    assert large <= sent["reduce-scatter"] <= most


@pytest.mark.parametrize("way", ["fit", "function"])
def test_blocks_that_are_computed_again_are_gathered_again(compiled, way):
    """And a step needs no more than what it keeps, and two of them."""
    devices, programs = compiled("h100:8")
    block = 4 * 8 * 1024**2
    large = NUM_BLOCKS * block
    mirrored, sharded = (
        programs[f"blocks, {kind}"][way][0]
        for kind in ("mirrored", "sharded variables")
    )
    sent = bytes_of(sharded)
    assert large < sent["all-gather"] <= 2 * large
    assert sent["reduce-scatter"] == large
    assert sent.get("all-reduce", 0) < SMALL
    saved = 3 * large * (1 - 1 / devices)
    assert sharded["peak"] <= mirrored["peak"] - saved + 2 * block


def test_a_function_needs_no_more_memory_than_fit(compiled):
    """Its variables, slots and gradients are in parts during a step, too."""
    for target in ("h100:8", "v5e:2x2"):
        _, programs = compiled(target)
        for kind in ("sharded", "sharded variables"):
            fit, function = (programs[kind][w][0] for w in ("fit", "function"))
            assert function["peak"] <= 1.05 * fit["peak"], f"{target}, {kind}"


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x2"])
def test_central_storage_computes_here_and_updates_on_the_host(
    compiled, target
):
    _, programs = compiled(target)
    step, update = programs["central"]["fit"]
    # Slots stay on the host. Gradients take their way back.
    assert not step["state"]
    assert TRAINED <= sum(step["received"].values()) < TRAINED + SMALL
    assert TRAINED <= step["outputs"] < TRAINED + SMALL
    assert bytes_of(step).keys() == {"all-reduce"}
    assert update["on_host"] and update["devices"] == 1
    assert not update["collectives"]
    # The count of steps is updated, the learning rate only read.
    assert update["aliased"] == TRAINED + SLOTS + 4
    assert update["received"] == {"gradients": TRAINED}


def test_each_replica_of_a_function_runs_a_kernel(compiled):
    """Keras' attention for TPUs, which XLA can't divide over devices."""
    _, programs = compiled("v5e:2x2")
    (program,) = programs["with a kernel"]["function"]
    # Variables, and two slots of each.
    gradients = sum(program["state"].values()) / 3
    sent = bytes_of(program)
    assert sent.keys() == {"all-reduce"}
    assert sent["all-reduce"] == pytest.approx(gradients, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "few, many", [("h100:8", "h100:4x8"), ("v5e:4x4", "v5e:16x16")]
)
def test_more_devices_cost_no_device_more(compiled, few, many):
    _, on_few = compiled(few)
    _, on_many = compiled(many)
    names = [("mirrored", way) for way in on_many["mirrored"]]
    for kind, way in [*names, ("sharded", "fit")]:
        program, other = on_many[kind][way][0], on_few[kind][way][0]
        name = f"{kind}, {way}"
        count = sum(counts_of(program).values())
        # The optimizer's counter may travel beside its parts.
        more = 1 if kind == "sharded" else 0
        assert count <= sum(counts_of(other).values()) + more, name
        # A function of several workers keeps old values beside the new ones.
        kept = 0
        if "one device" in on_few and "fit" not in way:
            kept = other["aliased"]
        assert program["peak"] <= 1.02 * (other["peak"] + kept), name
        # Padding differs.
        total = sum(bytes_of(program).values())
        assert total <= 1.02 * sum(bytes_of(other).values()), name
        assert program["flops"] <= 1.02 * other["flops"], name
