"""Workers that each keep a part of variables train and save as one device."""

import contextlib
import pathlib

import h5py
import keras
import numpy as np
import pytest

import keras_dist
from parity.harness import assert_same
from parity.harness import to_numpy
from sharded import helpers
from sharded import test_first_update
from sharded import test_loops
from sharded import test_state
from sharded.helpers import SHARDS_ON_DEVICES
from sharded.helpers import adam
from sharded.helpers import elements_of_part
from sharded.helpers import fit
from sharded.helpers import network
from sharded.helpers import shards
from sharded.helpers import state_of
from workers import clusters
from workers import sharded_jobs
from workers.clusters import on_workers
from workers.jobs import in_cluster

pytestmark = pytest.mark.only_on(
    "jax",
    "torch",
    reason="TensorFlow refuses to shard, as tests/parity tests.",
)
on_torch = pytest.mark.only_on(
    "torch", reason="JAX has this test in one process."
)
STATE, VARIABLES = "optimizer_state", "variables"
each_kind = pytest.mark.parametrize("what", [STATE, VARIABLES])
each_shape = pytest.mark.parametrize("shape", [(2, 1), (2, 2)])


def compiled(strategy):
    with strategy.scope():
        model = network()
        model.compile(adam(), "mse")
    return model


class Interrupt(keras.callbacks.Callback):
    """Ends training in the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def save_all(what, folder):
    """Trains and saves in each way there is; the state and files then."""
    strategy = in_cluster(what)
    # Files that only the chief has: a folder of each worker's own.
    own = pathlib.Path(folder, str(strategy.plan.cluster.index))
    own.mkdir(parents=True, exist_ok=True)
    model = compiled(strategy)
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(own / "each" / "{epoch}.keras"), save_best_only=True
    )
    fit(model, callbacks=[checkpoint], validation_split=0.2)
    model.save(str(own / "model.keras"))
    model.save_weights(str(own / "some.weights.h5"))
    saved = state_of(model)
    backed = compiled(strategy)
    backup = keras.callbacks.BackupAndRestore(str(own / "backup"))
    with contextlib.suppress(KeyboardInterrupt):
        fit(backed, epochs=4, callbacks=[backup, Interrupt()])
    paths = [p for p in own.rglob("*") if p.is_file()]
    return saved, {str(p.relative_to(own)) for p in paths}


def load_all(what, folder):
    """Loads what `save_all` has saved, and goes on."""
    strategy = in_cluster(what)
    chiefs = pathlib.Path(folder, "0")
    own = pathlib.Path(folder, str(strategy.plan.cluster.index))
    with strategy.scope():
        model = keras.models.load_model(str(chiefs / "model.keras"))
    loaded = state_of(model)
    fit(model)
    weights = compiled(strategy)
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(str(chiefs / "some.weights.h5"))
    backed = compiled(strategy)
    backup = keras.callbacks.BackupAndRestore(str(own / "backup"))
    fit(backed, epochs=4, callbacks=[backup])
    return loaded, *map(state_of, (model, weights, backed))


def places(path):
    found = []
    with h5py.File(path) as file:
        file.visit(found.append)
    return found


@each_kind
def test_what_the_chief_alone_writes_is_loaded_anywhere(what, tmp_path):
    devices = 1 if what == VARIABLES and not SHARDS_ON_DEVICES else 2
    saved, other = clusters.run(
        *(save_all, (what, tmp_path)), workers=2, devices=devices, timeout=300
    )
    assert other[1] == set()
    assert {
        *("model.keras", "some.weights.h5", "each/1.keras"),
        "backup/latest.weights.h5",
    } <= saved[1]
    loaded = clusters.run(
        *(load_all, (what, tmp_path)), workers=2, devices=1, timeout=300
    )
    plainly = keras.models.load_model(tmp_path / "0" / "model.keras")
    for state in other[0], *(each[0] for each in loaded), state_of(plainly):
        assert_same(state, saved[0], rtol=0, atol=0)
    best = keras.models.load_model(tmp_path / "0" / "each" / "2.keras")
    assert set(state_of(best)) == set(saved[0])
    plainly.save_weights(tmp_path / "own.weights.h5")
    theirs = places(tmp_path / "0" / "some.weights.h5")
    assert places(tmp_path / "own.weights.h5") == theirs
    # Training goes on from it.
    model, whole = helpers.compiled(None), helpers.compiled(None)
    fit(model, validation_split=0.2)
    between = state_of(model)
    fit(model)
    fit(whole, epochs=4)
    for _, gone_on, weights, backed in loaded:
        assert_same(weights, between)
        assert_same(gone_on, state_of(model))
        assert_same(backed, state_of(whole))


@each_shape
@pytest.mark.parametrize(
    "what",
    [STATE, pytest.param(VARIABLES, marks=shards)],
)
@on_workers()
def test_each_device_keeps_its_part(what, shape):
    strategy = in_cluster(what)
    model = compiled(strategy)
    fit(model, epochs=1)
    sharded = [v for v in model.optimizer.variables if len(v.shape)]
    if what == VARIABLES:
        sharded += model.trainable_variables
    workers, devices = shape
    index = strategy.plan.cluster.index
    for each in sharded:
        own = list(strategy.executor.storage(each).bytes_kept().values())
        if SHARDS_ON_DEVICES:
            part = elements_of_part(each.shape, workers * devices)
            assert own == [4 * part] * devices
        else:
            assert own == [4 * elements_of_part(each.shape, workers, index)]
    return [to_numpy(each).tolist() for each in sharded]


def drawn(seed):
    """Variables' values, drawn in several ways by a seed."""
    keras.utils.set_random_seed(seed)
    numbers = np.random.default_rng(seed)
    ways = (
        "glorot_uniform",
        keras.initializers.RandomNormal(seed=seed),
        lambda shape, dtype: numbers.normal(size=shape).astype(dtype),
    )
    made = [keras.Variable(way, shape=(7, 3), dtype="float32") for way in ways]
    made.append(keras.Variable(numbers.normal(size=(7, 3))))
    return [to_numpy(variable) for variable in made]


@shards
@each_shape
@on_workers()
def test_all_start_with_the_chiefs_values(shape):
    strategy = in_cluster(VARIABLES)
    with strategy.scope():
        values = drawn(strategy.plan.cluster.index)
    for own, expected in zip(values, drawn(0), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-7)


def different_variables():
    """Makes a variable of another shape on each worker."""
    strategy = in_cluster(VARIABLES)
    width = 3 + strategy.plan.cluster.index
    with strategy.scope():
        keras.Variable("glorot_uniform", shape=(7, width))


@shards
def test_other_variables_on_a_worker_are_an_error():
    with pytest.raises(RuntimeError, match="Workers made different variables"):
        clusters.run(different_variables, workers=2, devices=1, timeout=300)


WAYS = {
    "swapped": "at a read of variable_1, test_sharded.py",
    "read": "at a read of .*kernel, test_sharded.py",
    "saved": "at all variables, to save or load them, test_sharded.py",
    "saved in parts": "at save_sharded or restore_sharded, test_sharded.py",
    "assigned alone": "at an assignment of variable, test_sharded.py",
}


def apart(way):
    """Reads or assigns variables otherwise than the other worker does."""
    strategy = in_cluster(VARIABLES)
    is_chief = strategy.plan.is_chief
    with strategy.scope():
        first, second = (keras.Variable(np.full((4, 4), i)) for i in (1.0, 2.0))
    model = compiled(strategy)
    if way == "swapped":
        (first if is_chief else second).numpy()
    elif way == "assigned alone" and is_chief:
        first.assign(np.full((4, 4), 5.0))
    elif way == "assigned alone":
        fit(model)
    actions = {
        "read": model.get_weights,
        "saved": lambda: model.save_weights("/never/x.weights.h5"),
        "saved in parts": lambda: keras_dist.save_sharded(model, "/never/x"),
    }
    if way in actions:
        hook = "on_train_batch_end" if way == "read" else "on_epoch_end"
        callback = keras.callbacks.LambdaCallback(
            **{hook: lambda *_, **__: is_chief and actions[way]()}
        )
        fit(model, callbacks=[callback])


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
        clusters.run(apart, (way,), workers=2, devices=1, timeout=300)


@on_workers()
def test_the_chiefs_value_is_assigned():
    strategy = in_cluster(VARIABLES)
    with strategy.scope():
        variable = keras.Variable(np.zeros((4, 4)))
    variable.assign(np.full((4, 4), 5.0 + strategy.plan.cluster.index))
    assert np.unique(variable.numpy()).tolist() == [5.0]


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


@on_torch
@pytest.mark.parametrize(
    "test",
    OF_ONE_PROCESS,
    ids=lambda test: " ".join(map(str, test[1:])).removeprefix("test_"),
)
def test_it_passes_on_workers(test):
    clusters.run(sharded_jobs.passes, test, workers=2, devices=1, timeout=300)
