"""`fit` gives one device's numbers where the optimizer's state is in parts."""

import keras
import pytest

import keras_dist
from keras_dist.errors import UnsupportedModelError
from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from parity.harness import sharded
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


def _parameters():
    for case in CASES:
        if case.name not in REFUSED:
            yield pytest.param(case, 2, id=f"{case.name}-2")
        if case.name in ON_THREE:
            yield pytest.param(case, 3, id=f"{case.name}-3")


@shards
@pytest.mark.parametrize(("case", "num_replicas"), [*_parameters()])
def test_same_numbers(case, num_replicas):
    assert_same(train(case, num_replicas, sharded), plain(case), case.rtol)


@shards
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in REFUSED], ids=repr
)
def test_what_can_not_be_cut_is_refused(case):
    with pytest.raises(UnsupportedModelError, match=REFUSED[case.name]):
        train(case, 2, sharded)


@pytest.mark.only_on("tensorflow", reason="Others have it, also on workers.")
def test_the_error_says_which_backends_have_it():
    with pytest.raises(ValueError, match="a backend that can shard them"):
        sharded(2)
    with pytest.raises(ValueError, match=keras.backend.backend()):
        keras_dist.MultiWorkerMirroredStrategy(optimizer_state="sharded")


@shards
def test_no_cross_device_ops_reduce_parts():
    with pytest.raises(ValueError, match="Pass only one of the two"):
        keras_dist.MirroredStrategy(
            ["cpu:0", "cpu:1"],
            keras_dist.ReductionToOneDevice(),
            optimizer_state="sharded",
        )


def test_a_misspelt_state_is_refused():
    with pytest.raises(ValueError, match="'mirrored' or 'sharded'"):
        keras_dist.MirroredStrategy(["cpu:0"], optimizer_state="shard")
