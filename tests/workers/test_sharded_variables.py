"""Workers that each keep a part of every large variable, on PyTorch."""

import contextlib
import functools
import math
import tempfile

import h5py
import keras
import pytest

import keras_dist
from keras_dist.errors import DeviceError
from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from parity.harness import sharded_variables
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import state_of
from workers import clusters
from workers.sharded_models import OPTIMIZERS
from workers.sharded_programs import PROGRAMS
from workers.test_fit import EVERYWHERE
from workers.test_fit import NAMES

pytestmark = pytest.mark.only_on(
    "torch", reason="tests/parity/test_sharded.py has JAX."
)
CASES = {case.name: case for case in cases.CASES if BACKEND in case.backends}
CHOSEN = [name for name in NAMES if name in CASES]
MORE = ["optimizer_adamw", "layer_frozen", "layer_spectral_normalization"]
# By program, its argument in place of an optimizer's name.
ARGUMENTS = {"fail_and_go_on": ["forward", "backward"]}
# Programs that run with the optimizer's state in parts, too.
OF_STATE = [
    "adopted",
    "adversaries",
    "constrained",
    "half_toggled",
    "optimizer_each",
    "own_loop",
    "own_loop_of_two",
    "own_step_by_functions",
]
# Sums of bfloat16 are in another order.
TOLERANCES = {"half": 0.06, "half_toggled": 0.06}


def launched(job, *args, workers=2, devices=1):
    from workers import sharded_variables_jobs as jobs

    return clusters.run(
        getattr(jobs, job), args, workers=workers, devices=devices, timeout=300
    )


def _cases():
    yield from ((2, name) for name in [*CHOSEN, *MORE])
    yield from ((3, name) for name in EVERYWHERE)


@pytest.mark.parametrize(("workers", "name"), [*_cases()])
def test_same_numbers_on_every_worker(workers, name):
    case = CASES[name]
    for outcome in launched("train_case", name, workers=workers):
        assert_same(outcome, plain(case), case.rtol)


def _programs():
    for name in PROGRAMS:
        for argument in ARGUMENTS.get(name, ["adam"]):
            yield name, argument, "variables"
    yield "adversaries", "sgd", "variables"
    yield from (
        ("train_transformer", optimizer, "variables")
        for optimizer in OPTIMIZERS
        if optimizer != "adam"
    )
    yield from (
        ("train_convolutions", optimizer, "variables")
        for optimizer in ("adamw", "sgd")
    )
    # Of RMSprop, the first steps make much of what rounding left.
    yield from (
        ("train_transformer", optimizer, "optimizer_state")
        for optimizer in OPTIMIZERS
        if optimizer != "rmsprop"
    )
    for name in OF_STATE:
        yield name, "adam", "optimizer_state"


@pytest.mark.parametrize(("name", "argument", "what"), [*_programs()])
def test_a_program_computes_what_it_does_on_one_device(name, argument, what):
    expected = PROGRAMS[name](contextlib.nullcontext, argument)
    tolerance = TOLERANCES.get(name, 2e-4)
    for outcome in launched("run_program", name, argument, what):
        assert_same(outcome, expected, tolerance, atol=tolerance / 10)


@functools.cache
def saved_and_loaded():
    """Saved by 2 workers, loaded by 2 and plainly."""
    with tempfile.TemporaryDirectory() as folder:
        saved = launched("save_all", folder)
        loaded = launched("load_all", folder)
        model = keras.models.load_model(f"{folder}/0/model.keras")
        own, theirs = f"{folder}/own.weights.h5", f"{folder}/0/some.weights.h5"
        model.save_weights(own)
        return saved, loaded, state_of(model), _places(own), _places(theirs)


def _places(path):
    found = []
    with h5py.File(path) as file:
        file.visit(found.append)
    return found


def test_the_chief_alone_writes():
    saved = saved_and_loaded()[0]
    assert saved[1]["files"] == []
    assert {
        "model.keras",
        "some.weights.h5",
        "each/1.keras",
        "backup/latest.weights.h5",
    } <= set(saved[0]["files"])


def test_what_was_saved_is_what_there_was():
    saved, loaded, plainly, own, theirs = saved_and_loaded()
    for state in saved[1]["saved"], loaded[0]["loaded"], loaded[1]["loaded"]:
        assert_same(state, saved[0]["saved"], rtol=0, atol=0)
    assert_same(plainly, saved[0]["saved"], rtol=0, atol=0)
    assert own == theirs


def test_training_goes_on_from_it():
    loaded = saved_and_loaded()[1]
    model = compiled(None)
    fit(model, validation_split=0.2)
    between = state_of(model)
    fit(model)
    whole = compiled(None)
    fit(whole, epochs=4)
    for found in loaded:
        assert_same(found["weights"], between)
        assert_same(found["gone_on"], state_of(model))
        assert_same(found["backed"], state_of(whole))


@pytest.mark.parametrize("count", [2, 3])
def test_each_worker_keeps_its_part(count):
    wholes, owns = 0, [0] * count
    results = launched("bytes_kept", None, workers=count)
    for worker, (kept, more) in enumerate(results):
        for shape, (own,) in kept:
            if len(shape):
                wholes += 4 * math.prod(shape) / count
                owns[worker] += own
        # No whole tensor is left, nor a gradient.
        assert more <= 20_000
    # The first axis may not divide equally.
    assert max(owns) <= 1.02 * wholes / count


def test_each_worker_keeps_its_part_of_weights_that_are_not_trained():
    for found in launched("frozen_bytes_kept", None)[0]:
        sharded = {
            path for path, (own, whole) in found.items() if own == [whole // 2]
        }
        whole = {path for path, (own, size) in found.items() if own == [size]}
        assert sharded == {
            *("first/kernel", "tables/fixed", "tables/moving"),
            "second/kernel",
        }
        assert sharded | whole == set(found)


def test_each_layer_is_gathered_once_for_each_pass():
    for each in launched("collectives", None)[0]:
        assert each == {"_allgather_base_": 8, "all_to_all": 4}


def test_gathers_are_in_the_dtype_that_layers_compute_in():
    for num_bytes, count in launched("bytes_gathered", None):
        assert num_bytes == 2 * 2 * count  # in both passes


def test_what_a_user_sees():
    for found in launched("shown", None):
        assert found["is_same"]
        assert found["classes"] == {"Sequential", "InputLayer", "Dense"}
        assert "FSDP" not in found["config"]
        assert "in parts" in found["repr"]
        assert not found["has_group"]


def test_what_can_not_be_right_is_refused():
    for found in launched("refused", None):
        for name in "norm", "doubled", "numpy", "reduced":
            assert "It is a sum over workers" in found[name], name
        assert "`keras_dist.value_and_grad`" in found["backward"]
        assert "a gradient of a gradient" in found["nested"]
        assert "which is not trainable" in found["frozen"]
        assert "mine" in found["raised"]
        assert "outside of `fit`" in found["apply"]
        assert "torch.autograd.grad was called" in found["Derives"]
        assert "`create_graph`" in found["DerivesTwice"]
        assert "in two ways" in found["DerivesInTwoWays"]
        assert all("UnsupportedModelError" in text for text in found.values())


def test_several_devices_of_a_process_are_refused():
    with pytest.raises(DeviceError, match="keras-dist run"):
        sharded_variables(2)
    for text in launched("devices_refused", devices=2):
        assert "DeviceError" in text
        assert "a process for each device" in text


def test_one_worker_with_one_device_is_plain():
    strategy = keras_dist.MirroredStrategy(["cpu:0"], variables="sharded")
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    assert type(variable) is keras.Variable
