"""Workers that each keep a part of the optimizer's state."""

import functools
import tempfile

import keras
import numpy as np
import pytest

from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from sharded.helpers import SHARDS_VARIABLES
from sharded.helpers import compiled
from sharded.helpers import elements_of_part
from sharded.helpers import fit
from sharded.helpers import shards
from sharded.helpers import shards_variables
from sharded.helpers import state_of
from workers import clusters
from workers import sharded_jobs

pytestmark = shards
NAMES = [
    "weighted",
    "batch_norm_conv_adam",
    "fewer_than_replicas",
    "optimizer_adamw",
    "optimizer_global_clipnorm",
    "optimizer_accumulation",
    "optimizer_ema",
    "layer_no_numbers",
    "layer_regularizers",
    "layer_frozen",
    "mixed_float16",
    "loss_scale_overflow",
]
SHAPES = [(2, 1), (2, 2)]
BY_NAME = {case.name: case for case in cases.CASES if BACKEND in case.backends}


STATE, VARIABLES = "optimizer_state", "variables"
WHATS = [STATE]
if SHARDS_VARIABLES:
    WHATS.append(pytest.param(VARIABLES, marks=pytest.mark.runs_on("jax")))


def launched(job, shape, what, *args):
    workers, devices = shape
    return clusters.run(
        job, (what, *args), workers=workers, devices=devices, timeout=300
    )


@pytest.mark.parametrize(
    "what", [STATE, VARIABLES] if SHARDS_VARIABLES else [STATE]
)
@pytest.mark.parametrize(
    ("shape", "name"),
    [((2, 1), name) for name in NAMES[:5]] + [((2, 2), n) for n in NAMES],
)
def test_same_numbers_on_every_worker(shape, name, what):
    case = BY_NAME[name]
    for outcome in launched(sharded_jobs.train_case, shape, what, name):
        assert_same(outcome, plain(case), case.rtol)


@functools.cache
def saved_and_loaded(what):
    """Saved by 2 workers of 2 devices, loaded by 2 of one and plainly."""
    with tempfile.TemporaryDirectory() as folder:
        saved = launched(sharded_jobs.save_all, (2, 2), what, folder)
        loaded = launched(sharded_jobs.load_all, (2, 1), what, folder)
        model = keras.models.load_model(f"{folder}/0/model.keras")
        best = keras.models.load_model(f"{folder}/0/each/2.keras")
        return saved, loaded, state_of(model), state_of(best)


@pytest.mark.parametrize("what", WHATS)
def test_the_chief_alone_writes(what):
    saved = saved_and_loaded(what)[0]
    assert saved[1]["files"] == []
    assert {
        "model.keras",
        "some.weights.h5",
        "each/1.keras",
        "backup/latest.weights.h5",
    } <= set(saved[0]["files"])


@pytest.mark.parametrize("what", WHATS)
def test_what_was_saved_is_what_there_was(what):
    saved, loaded, plainly, best = saved_and_loaded(what)
    for found in saved[1], loaded[0], loaded[1]:
        state = found.get("saved", found.get("loaded"))
        assert_same(state, saved[0]["saved"], rtol=0, atol=0)
    assert_same(plainly, saved[0]["saved"], rtol=0, atol=0)
    assert set(best) == set(plainly)


@pytest.mark.parametrize("what", WHATS)
def test_training_goes_on_from_it(what):
    _, loaded, _, _ = saved_and_loaded(what)
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


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_device_keeps_its_part(shape, what):
    workers, devices = shape
    count = workers * devices
    results = launched(sharded_jobs.bytes_kept, shape, what)
    for kept, _ in results:
        for own, slot in kept:
            assert own == [4 * elements_of_part(slot, count)] * devices
    assert results[0][1] == results[1][1]


@shards_variables
@pytest.mark.parametrize("shape", SHAPES)
def test_all_start_with_the_chiefs_values(shape):
    results = launched(sharded_jobs.initial_values, shape, VARIABLES)
    _, chiefs = results[0]
    for values, _ in results:
        for own, expected in zip(values, chiefs, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-7)


@shards_variables
def test_other_variables_on_a_worker_are_an_error():
    with pytest.raises(RuntimeError, match="Workers made different variables"):
        launched(sharded_jobs.different_variables, (2, 1), VARIABLES)


WAYS = {
    "swapped": "at a read of variable_1, sharded_jobs.py",
    "read": "at a read of .*kernel, sharded_jobs.py",
    "saved": "at all variables, to save or load them, sharded_jobs.py",
    "saved in parts": "at save_sharded or restore_sharded, sharded_jobs.py",
    "assigned alone": "at an assignment of variable, sharded_jobs.py",
}


# On PyTorch, the other worker waits in another group of gloo meanwhile.
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.runs_on("torch"))
        if way == "read"
        else way
        for way in WAYS
    ],
)
def test_workers_that_are_apart_are_an_error_and_exchange_nothing(way):
    with pytest.raises(RuntimeError, match=WAYS[way]):
        launched(sharded_jobs.apart, (2, 1), VARIABLES, way)


def test_the_chiefs_value_is_assigned():
    found = launched(sharded_jobs.assigned, (2, 1), VARIABLES)
    assert found == [[5.0], [5.0]]
