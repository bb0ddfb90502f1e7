"""`fit` gives one device's numbers where variables are in parts."""

import keras
import pytest

import keras_dist
from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from parity.harness import sharded
from parity.harness import sharded_variables
from parity.harness import train
from parity.test_sharded import ON_THREE
from sharded.helpers import shards

CASES = [case for case in cases.CASES if BACKEND in case.backends]


def _parameters():
    for case in CASES:
        yield pytest.param(case, 2, id=f"{case.name}-2")
        if case.name in ON_THREE:
            yield pytest.param(case, 3, id=f"{case.name}-3")


@shards
@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize(("case", "num_replicas"), [*_parameters()])
def test_same_numbers(case, num_replicas):
    found = train(case, num_replicas, sharded_variables)
    assert_same(found, plain(case), case.rtol)


@pytest.mark.only_on(
    "tensorflow", reason="Others have it, at least on workers."
)
def test_the_error_says_which_backends_have_it():
    with pytest.raises(ValueError, match=r"\('jax' or 'torch'\)"):
        sharded_variables(2)
    with pytest.raises(ValueError, match=keras.backend.backend()):
        keras_dist.MultiWorkerMirroredStrategy(variables="sharded")


@pytest.mark.only_on("torch", reason="It has shards on workers only.")
@pytest.mark.parametrize("make", [sharded_variables, sharded])
def test_the_error_says_how_to_start_a_process_for_each_device(make):
    with pytest.raises(ValueError, match="keras-dist run --workers"):
        make(2)
    with make(1).scope():
        assert type(keras.Variable([1.0])) is keras.Variable


@shards
def test_no_cross_device_ops_reduce_parts():
    with pytest.raises(ValueError, match="With variables='sharded'"):
        keras_dist.MirroredStrategy(
            ["cpu:0", "cpu:1"],
            keras_dist.ReductionToOneDevice(),
            variables="sharded",
        )


def test_a_misspelt_value_is_refused():
    with pytest.raises(ValueError, match="'mirrored' or 'sharded'"):
        keras_dist.MirroredStrategy(["cpu:0"], variables="shard")
