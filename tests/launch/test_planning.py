"""`plan` and `summary` compute memory and traffic by formulas with sources."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_dist
import keras_dist.planning
from keras_dist.planning import estimates
from keras_dist.planning.estimates import Flat
from keras_dist.planning.estimates import Kept
from keras_dist.planning.estimates import Load
from keras_dist.planning.estimates import Memory
from keras_dist.planning.estimates import Placement
from keras_dist.planning.estimates import load_of_parameters
from keras_dist.planning.estimates import memory
from keras_dist.planning.estimates import transfers
from keras_dist.planning.tables import bytes_text
from keras_dist.planning.tables import names_text
from keras_dist.planning.tables import read_bytes
from keras_dist.planning.tables import read_number
from keras_dist.tools.counting import load_of

GPUS = tuple(f"gpu:{index}" for index in range(4))
# 1,000 parameters: T, F, 2 slots, counters.
LOAD = Load(4000, 400, (Flat(1000, 4), Flat(1000, 4)), 8)


def test_the_issues_example():
    placement = Placement(
        tuple(f"gpu:{index}" for index in range(8)), split="optimizer"
    )
    load = load_of_parameters(7_000_000_000, "bfloat16", "adam")
    found = memory(load, placement)
    assert len(found) == 8
    # 14 GB of parameters, 28 GB of slots over 8, 14 GB of gradients.
    assert set(found.values()) == {
        Memory(14 * 10**9, 3_500_000_008, 0, 14 * 10**9)
    }
    sent = transfers(load, placement)
    assert [each.total for each in sent] == [7 * 14 * 10**9] * 2
    assert sent[0].sent[0] == ("gpu:0", 12_250_000_000)


def test_mirrored_memory_does_not_depend_on_the_number_of_devices():
    for count in (1, 2, 4):
        found = memory(LOAD, Placement(GPUS[:count]), activations=50)
        each = Memory(4400, 8008, 0, 4000, 50)
        assert found == dict.fromkeys(GPUS[:count], each)
        assert (each.kept, each.most) == (12408, 16458)


def test_parts_are_those_of_the_replicas_of_all_workers():
    placement = Placement(GPUS, (), 2, split="optimizer")
    assert memory(LOAD, placement)["gpu:0"].optimizer == 2 * 500 + 8
    # Slots are padded.
    load = Load(40, 0, (Flat(10, 4), Flat(3, 4)), 8)
    found = memory(load, Placement(GPUS, split="optimizer"))
    assert found["gpu:3"].optimizer == 8 + 3 * 4 + 1 * 4
    placement = Placement(GPUS, (), 2, split="variables")
    found = memory(LOAD, placement, activations=50)
    # While a step runs, layers use whole variables: at most all at once.
    each = Memory(550, 2 * 500 + 8, 4400 - 550, 500, 50)
    assert found == dict.fromkeys(GPUS, each)


def test_central_memory_is_on_the_parameter_device():
    found = memory(LOAD, Placement(GPUS, ("cpu:0",)), activations=50)
    assert found["gpu:2"] == Memory(0, 0, 4400, 4000, 50)
    assert found["cpu:0"] == Memory(4400, 8008, 0, 4000)
    assert list(found) == [*GPUS, "cpu:0"]
    # A device that computes may keep variables too.
    found = memory(LOAD, Placement(GPUS[:2], GPUS[:1]))
    assert found["gpu:0"] == Memory(4400, 8008, 0, 4000)
    assert found["gpu:1"] == Memory(0, 0, 4400, 4000)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_both_ways_of_summing_send_as_much(count):
    names = GPUS[:count]
    ring = transfers(LOAD, Placement(names))
    halves = transfers(LOAD, Placement(names, split="optimizer"))
    assert halves == transfers(LOAD, Placement(names, split="variables"))
    total = 2 * (count - 1) * LOAD.trainable
    assert sum(each.total for each in ring) == total
    assert sum(each.total for each in halves) == total
    if count == 1:
        assert ring == transfers(LOAD, Placement(names, names)) == ()
    else:
        each = math.ceil(2 * (count - 1) / count * 4000)
        assert ring[0].sent == tuple((name, each) for name in names)


def test_workers_add_up_on_their_own_devices_first():
    local, wire = transfers(LOAD, Placement(GPUS, (), 3))
    assert (local.between, local.total) == ("devices", 3 * 2 * 3 * 4000)
    assert (wire.between, wire.total) == ("workers", 2 * 2 * 4000)
    assert wire.sent[0] == ("worker 0", math.ceil(2 * 2 / 3 * 4000))
    (wire,) = transfers(LOAD, Placement(GPUS[:1], (), 2))
    assert (wire.between, wire.total) == ("workers", 2 * 4000)


def test_central_variables_travel_both_ways():
    there, back = transfers(LOAD, Placement(GPUS, ("cpu:0",)))
    assert there.sent == (("cpu:0", 4 * 4400),)
    assert back.sent == tuple((name, 4000) for name in GPUS)
    assert (there.total, back.total) == (4 * 4400, 4 * 4000)
    # Each parameter device sends what it keeps.
    kept = {"gpu:0": Kept(3400, 3000), "gpu:1": Kept(1000, 1000)}
    there, back = transfers(LOAD, Placement(GPUS[:2], GPUS[:2]), kept)
    assert dict(there.sent) == {"gpu:0": 3400, "gpu:1": 1000}
    assert dict(back.sent) == {"gpu:0": 1000, "gpu:1": 3000}


@pytest.mark.parametrize("name", estimates.SLOTS)
def test_keras_makes_as_many_slots(name):
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(30)])
    known = {kind.lower(): kind for kind in dir(keras.optimizers)}
    optimizer = getattr(keras.optimizers, known[name])()
    optimizer.build(model.trainable_variables)
    found = load_of(model, optimizer)
    assert (
        sum(flat.length for flat in found.slots) == 630 * estimates.SLOTS[name]
    )
    assert found.counters <= 16


def test_keras_gives_variables_the_type_of_a_policy():
    for name, size in estimates.VARIABLE_BYTES.items():
        dtype = keras.DTypePolicy(name).variable_dtype
        assert np.dtype(dtype.replace("bfloat16", "float16")).itemsize == size


NUMBERS = {"7e9": 7 * 10**9, "7B": 7 * 10**9, "1.5b": 15 * 10**8}
NUMBERS |= {"350M": 35 * 10**7, "20_000": 20_000, "20,000": 20_000}
NUMBERS |= {" 12 k ": 12_000, "1T": 10**12}
BYTES = {"20e9": 20 * 10**9, "512B": 512, "20 G": 20 * 10**9}
BYTES |= {"20GB": 20 * 10**9, "1.5 GiB": 3 * 2**29, "4ki": 4096}
SHOWN = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_960: "1.0 MB"}
SHOWN |= {12_250_000_000: "12.2 GB", 10**21: "1000.0 EB"}


def test_numbers_are_read_and_shown_as_people_write_them():
    assert {text: read_number(text) for text in NUMBERS} == NUMBERS
    assert {text: read_bytes(text) for text in BYTES} == BYTES
    assert {number: bytes_text(number) for number in SHOWN} == SHOWN


@given(st.integers(1, 10**17))
def test_bytes_that_are_shown_can_be_read(number):
    assert read_bytes(bytes_text(number)) == pytest.approx(number, rel=0.051)


def test_what_is_no_number_is_refused():
    for text in ("", "GB", "-1", "0", "7BB", "1x", "1e30G"):
        with pytest.raises(ValueError, match="20GiB"):
            read_bytes(text)
    for text in ("", "B", "-1", "1e-3", "0.2", "1x", "7 BB"):
        with pytest.raises(ValueError, match="could not be read"):
            read_number(text)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["cpu:0"], "cpu:0"),
        (["gpu:0", "gpu:1", "gpu:2", "gpu:3"], "gpu:0-3"),
        (["gpu:9", "gpu:10"], "gpu:9-10"),
        (["gpu:0", "gpu:2", "cpu:0"], "gpu:0 gpu:2 cpu:0"),
        (["parameter device", "device 0"], "parameter device device 0"),
    ],
)
def test_names_that_follow_each_other_are_one(names, text):
    assert names_text(names) == text


def test_the_formulas_have_sources():
    for text in (keras_dist.planning.__doc__, keras_dist.summary.__doc__):
        text = " ".join(text.split())
        assert "Patarasuk and Yuan" in text and "ZeRO" in text
