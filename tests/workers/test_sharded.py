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
from sharded import test_first_update
from sharded import test_loops
from sharded import test_state
from sharded.helpers import SHARDS_ON_DEVICES
from sharded.helpers import compiled
from sharded.helpers import elements_of_part
from sharded.helpers import fit
from sharded.helpers import shards
from sharded.helpers import state_of
from workers import clusters
from workers import sharded_jobs

pytestmark = pytest.mark.only_on(
    "jax",
    "torch",
    reason="TensorFlow refuses to shard, as tests/parity tests.",
)
on_workers = pytest.mark.only_on(
    "torch", reason="JAX has this test in one process."
)
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
if SHARDS_ON_DEVICES:
    WHATS.append(pytest.param(VARIABLES, marks=pytest.mark.runs_on("jax")))


def launched(job, shape, what, *args):
    workers, devices = shape
    return clusters.run(
        job, (what, *args), workers=workers, devices=devices, timeout=300
    )


@pytest.mark.parametrize(
    "what", [STATE, VARIABLES] if SHARDS_ON_DEVICES else [STATE]
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
    results = launched(sharded_jobs.bytes_kept, shape, what)
    for index, (kept, _) in enumerate(results):
        for own, slot in kept:
            if SHARDS_ON_DEVICES:
                part = elements_of_part(slot, workers * devices)
                assert own == [4 * part] * devices
            else:
                assert own == [4 * elements_of_part(slot, workers, index)]
    assert results[0][1] == results[1][1]


@shards
@pytest.mark.parametrize("shape", SHAPES)
def test_all_start_with_the_chiefs_values(shape):
    results = launched(sharded_jobs.initial_values, shape, VARIABLES)
    _, chiefs = results[0]
    for values, _ in results:
        for own, expected in zip(values, chiefs, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-7)


@shards
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


# Tests of one process, by module and name, with their arguments.
LOOPS = "sharded.test_loops"
STATES = "sharded.test_state"
FIRST = "sharded.test_first_update"
OF_ONE_PROCESS = [
    *(
        (LOOPS, "test_the_numbers_of_one_device", "state", name)
        for name in [*test_loops.OPTIMIZERS, *test_loops.WHOLE]
    ),
    (LOOPS, "test_an_update_of_some_variables"),
    (LOOPS, "test_mixed_precision", "state", "mixed_float16"),
    (STATES, "test_slots_look_as_they_do_without_a_strategy"),
    (STATES, "test_another_number_of_gradients_is_refused", 1),
    (STATES, "test_another_number_of_gradients_is_refused", 5),
    (
        STATES,
        "test_a_slot_that_is_assigned_is_what_the_next_step_starts_from",
    ),
    (STATES, "test_replica_functions", 2, False),
    (STATES, "test_replica_functions", 2, True),
    (STATES, "test_an_update_outside_of_replicas"),
    (STATES, "test_a_setting_that_changes_counts_from_the_next_step"),
    (STATES, "test_a_failing_step_leaves_everything_readable"),
    *(
        (STATES, "test_what_is_changed_between_steps_counts", name, outside)
        for name in test_state.CHANGES
        for outside in (False, True)
    ),
    *(
        (FIRST, name, setting, *rest)
        for setting in test_first_update.SETTINGS
        for name, *rest in (
            ("test_outside_of_run",),
            ("test_in_run", "sharded"),
        )
    ),
    (FIRST, "test_an_update_that_fails_leaves_slots_as_they_were"),
    (FIRST, "test_a_model_without_trainable_weights"),
]


@on_workers
@pytest.mark.parametrize(
    "test",
    OF_ONE_PROCESS,
    ids=lambda test: " ".join(map(str, test[1:])).removeprefix("test_"),
)
def test_it_passes_on_workers(test):
    clusters.run(sharded_jobs.passes, test, workers=2, devices=1, timeout=300)
