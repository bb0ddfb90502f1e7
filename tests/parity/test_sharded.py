"""`fit` gives one device's numbers where slots or variables are in parts."""

import keras
import pytest

import keras_dist
from keras_dist.errors import UnsupportedModelError
from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import devices
from parity.harness import plain
from parity.harness import sharded
from parity.harness import sharded_variables
from parity.harness import train
from sharded.helpers import shards

CASES = [case for case in cases.CASES if BACKEND in case.backends]
# Why these can't be cut, as the error says it.
REFUSED = {"optimizer_lamb": "norms of each whole variable"}
ON_THREE = (
    "weighted",
    "batch_norm_conv_adam",
    "fewer_than_replicas",
    "optimizer_adamw",
    "optimizer_accumulation_adam_clipped",
    "optimizer_ema",
    "layer_regularizers",
    "mixed_float16",
    "loss_scale_overflow",
)


MAKE = {"optimizer_state": sharded, "variables": sharded_variables}


def _parameters():
    for what in MAKE:
        for case in CASES:
            if what == "variables" or case.name not in REFUSED:
                for count in (2, 3) if case.name in ON_THREE else (2,):
                    name = f"{what}-{case.name}-{count}"
                    yield pytest.param(what, case, count, id=name)


@shards
@pytest.mark.parametrize(("what", "case", "num_replicas"), [*_parameters()])
def test_same_numbers(what, case, num_replicas, request):
    if what == "variables":
        request.getfixturevalue("all_are_large")
    found = train(case, num_replicas, MAKE[what])
    assert_same(found, plain(case), case.rtol)


@shards
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in REFUSED], ids=repr
)
def test_what_can_not_be_cut_is_refused(case):
    with pytest.raises(UnsupportedModelError, match=REFUSED[case.name]):
        train(case, 2, sharded)


@pytest.mark.only_on("tensorflow", reason="Others have it, also on workers.")
@pytest.mark.parametrize("what", MAKE)
def test_the_error_says_which_backends_have_it(what):
    with pytest.raises(
        ValueError, match=r"a backend that can|'jax' or 'torch'"
    ):
        MAKE[what](2)
    with pytest.raises(ValueError, match=BACKEND):
        keras_dist.MultiWorkerMirroredStrategy(**{what: "sharded"})


@pytest.mark.only_on("torch", reason="It has shards on workers only.")
@pytest.mark.parametrize("make", MAKE.values())
def test_the_error_says_how_to_start_a_process_for_each_device(make):
    with pytest.raises(ValueError, match="keras-dist run --workers"):
        make(2)
    with make(1).scope():
        assert type(keras.Variable([1.0])) is keras.Variable


@shards
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("optimizer_state", "Pass only one of the two"),
        ("variables", "With variables='sharded'"),
    ],
)
def test_no_cross_device_ops_reduce_parts(what, told):
    operations = keras_dist.ReductionToOneDevice()
    with pytest.raises(ValueError, match=told):
        keras_dist.MirroredStrategy(devices(2), operations, **{what: "sharded"})


@pytest.mark.parametrize("what", MAKE)
def test_a_misspelt_value_is_refused(what):
    with pytest.raises(ValueError, match="'mirrored' or 'sharded'"):
        keras_dist.MirroredStrategy(["cpu:0"], **{what: "shard"})
