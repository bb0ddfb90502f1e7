"""An optimizer whose state is in parts is used as any other."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.errors import UnsupportedModelError
from keras_versions import excludes_when_built
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import to_numpy
from sharded.helpers import X
from sharded.helpers import Y
from sharded.helpers import adam
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import mirrored
from sharded.helpers import network
from sharded.helpers import sharded
from sharded.helpers import shards
from sharded.helpers import state_of
from steps import train_step

pytestmark = shards


def slots(optimizer):
    """The variables that are of other variables."""
    return [v for v in optimizer.variables if len(v.shape)]


def test_slots_look_as_they_do_without_a_strategy():
    keras.utils.clear_session()
    plain = compiled(None)
    keras.utils.clear_session()  # names are counted from one again
    model = compiled(3)
    fit(plain)
    fit(model)
    for own, other in zip(
        model.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        assert isinstance(own, keras.Variable)
        assert (own.shape, own.dtype) == (other.shape, other.dtype)
        assert own.name == other.name
        np.testing.assert_allclose(
            own.numpy(), other.numpy(), rtol=2e-5, atol=1e-6
        )


@pytest.mark.parametrize("given", [1, 5])
def test_another_number_of_gradients_is_refused(given):
    strategy = sharded(2)
    with strategy.scope():
        model = network()
        optimizer = adam()
    optimizer.build(model.trainable_variables)

    def update():
        optimizer.apply([keras.ops.ones((4, 5))] * given)

    with pytest.raises(ValueError, match="(?i)gradients"):
        strategy.run(update)
    assert int(optimizer.iterations) == 0


def test_a_slot_that_is_assigned_is_what_the_next_step_starts_from():
    outcomes = []
    for model in (compiled(None), compiled(2)):
        fit(model, epochs=1)
        for slot in slots(model.optimizer):
            slot.assign(keras.ops.full(slot.shape, 0.25))
            slot.assign_add(keras.ops.ones(slot.shape))
        assert all((to_numpy(s) == 1.25).all() for s in slots(model.optimizer))
        fit(model, epochs=1)
        outcomes.append(state_of(model))
    assert_same(outcomes[1], outcomes[0])


def own_rows(array, value_context):
    """The rows of one replica."""
    parts = np.array_split(array, value_context.num_replicas_in_sync)
    own = parts[value_context.replica_id_in_sync_group]
    return keras.ops.convert_to_tensor(own)


def train_by_hand(strategy, compile):
    with strategy.scope():
        model, optimizer = network(), adam()
    step = train_step(
        model,
        optimizer,
        lambda x, y: keras.ops.mean(keras.ops.square(model(x) - y), axis=-1),
    )
    if compile:
        step = keras_dist.function(step)
    losses = []
    for start in range(0, 20, 4):
        values = [
            strategy.experimental_distribute_values_from_function(
                lambda c, a=array[start : start + 4]: own_rows(a, c)
            )
            for array in (X, Y)
        ]
        each = strategy.run(step, args=tuple(values))
        losses.append(to_numpy(strategy.reduce("SUM", each, axis=None)))
    variables = [*model.variables, *optimizer.variables]
    return {str(i): to_numpy(v) for i, v in enumerate(variables)} | {
        "losses": np.array(losses)
    }


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_replica_functions(num_replicas, compile):
    one = keras_dist.OneDeviceStrategy("cpu:0")
    expected = train_by_hand(one, False)
    assert_same(train_by_hand(sharded(num_replicas), compile), expected)


@pytest.mark.filterwarnings("ignore:Nothing is distributed")
def test_an_update_outside_of_replicas():
    outcomes = []
    for strategy in (keras_dist.OneDeviceStrategy("cpu:0"), sharded(3)):
        with strategy.scope():
            model, optimizer = network(), adam()
            for step in range(4):
                gradients = [
                    keras.ops.full(v.shape, 0.1 * (step + 1))
                    for v in model.trainable_variables
                ]
                optimizer.apply(gradients, model.trainable_variables)
        variables = [*model.variables, *optimizer.variables]
        outcomes.append({str(i): to_numpy(v) for i, v in enumerate(variables)})
    assert_same(outcomes[1], outcomes[0])


def test_an_update_by_hand_of_a_slot():
    strategy = sharded(2)
    with strategy.scope():
        model, optimizer = network(), adam()
        optimizer.build(model.trainable_variables)
    slot = slots(optimizer)[0]
    strategy.extended.update(slot, lambda v: v.assign(v.value + 2.0))
    assert (to_numpy(slot) == 2.0).all()
    values = strategy.experimental_local_results(slot)
    assert [to_numpy(v.value).tolist() for v in values] == [
        to_numpy(slot).tolist()
    ] * 2
    assert "kernel" in repr(slot)


def test_a_setting_that_changes_counts_from_the_next_step():
    outcomes = []
    for model in (compiled(None), compiled(2)):
        fit(model, epochs=1)
        model.optimizer.learning_rate = 0.3
        fit(model, epochs=1)
        outcomes.append(state_of(model))
    assert_same(outcomes[1], outcomes[0])


def test_a_refused_optimizer_is_refused_by_compile():
    with sharded(2).scope():
        model = network()
        with pytest.raises(UnsupportedModelError, match="Adafactor"):
            model.compile("adafactor", "mse")
        model.compile("adam", "mse")
    fit(model, epochs=1)


def test_a_model_that_was_trained_before():
    expected, model = compiled(None), compiled(None)
    fit(expected)
    fit(model)
    fit(expected)
    model = sharded(3).distribute(model)
    fit(model)
    assert_same(state_of(model), state_of(expected))
    executor = model.trainable_variables[0].distribute_strategy.executor
    assert executor.storage(slots(model.optimizer)[0]).is_split


class Failure(Exception):
    """Nothing else raises it."""


def test_a_failing_step_leaves_everything_readable():
    class Fragile(keras.layers.Layer):
        fails = False

        def call(self, inputs):
            if self.fails:
                raise Failure
            return inputs

    outcomes = []
    for make in (None, 2):
        model = compiled(make)
        fragile = Fragile()
        if make is not None:
            with sharded(2).scope():
                fragile = Fragile()
                model = keras.Sequential([*network().layers, fragile])
                model.compile(adam(), "mse", run_eagerly=BACKEND == "jax")
        fit(model, epochs=1)
        before = state_of(model)
        if make is not None:
            fragile.fails = True
            with pytest.raises(Failure):
                fit(model, epochs=1)
            assert_same(state_of(model), before, rtol=0, atol=0)
            fragile.fails = False
        fit(model, epochs=1)
        outcomes.append(state_of(model))
    assert_same(outcomes[1], outcomes[0])


class Fixed(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that is changed from outside."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return keras.ops.convert_to_tensor(self.rate, "float32")


def _numpy_decay(optimizer, step):
    optimizer.weight_decay = np.float32(step)


def _later_exclusion(optimizer, step):
    optimizer.weight_decay = 0.5
    if step == 2:
        optimizer.exclude_from_weight_decay(var_names=["v"])


def _changed_schedule(optimizer, step):
    optimizer._learning_rate.rate = 0.1 * step


def _new_schedule(optimizer, step):
    optimizer.learning_rate = Fixed(0.1 * step)


rates = {"now": 0.0}


def _other_rate(optimizer, step):
    rates["now"] = 0.4 - 0.1 * step


CHANGES = {
    "decay": (lambda: 0.1, _numpy_decay),
    "exclusion": (lambda: 0.1, _later_exclusion),
    "changed": (lambda: Fixed(1.0), _changed_schedule),
    "new": (lambda: Fixed(1.0), _new_schedule),
    "callable": (lambda: lambda: rates["now"], _other_rate),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=excludes_when_built)
        if name == "exclusion"
        else name
        for name in CHANGES
    ],
)
@pytest.mark.filterwarnings("ignore:Nothing is distributed")
@pytest.mark.parametrize("outside", [False, True], ids=["run", "outside"])
def test_what_is_changed_between_steps_counts(name, outside):
    """As it does where each replica has all of the state."""
    make_rate, change = CHANGES[name]
    outcomes = []
    for make in (mirrored, sharded):
        strategy = make(2)
        with strategy.scope():
            v = keras.Variable(np.ones(5, "float32"), name="v")
            w = keras.Variable(np.ones(2, "float32"), name="w")
            optimizer = keras.optimizers.SGD(make_rate())
            optimizer.build([v, w])

        def step(optimizer=optimizer, v=v, w=w):
            optimizer.apply([keras.ops.ones(5), keras.ops.ones(2)], [v, w])

        found = []
        for count in range(4):
            change(optimizer, count)
            step() if outside else strategy.run(step)
            found.append(to_numpy(v))
        outcomes.append(np.array(found))
    np.testing.assert_allclose(outcomes[1], outcomes[0], rtol=1e-6)
    assert len(np.unique(outcomes[0])) == 4
