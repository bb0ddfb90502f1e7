"""A step with central storage sends each variable once, each way.

Counted are transfers, programs and memory.
"""

import warnings

import jax
import keras
import numpy as np
import pytest
from central_models import classifier
from central_models import variables_of
from keras import ops

import keras_dist
from backends.jax.measures import count_all_reduces
from backends.jax.measures import programs
from backends.jax.measures import size_of
from parity import harness

FIT = {"batch_size": 25, "epochs": 2, "shuffle": False, "verbose": 0}


def make(parameter="cpu:3", num_replicas=2, **kwargs):
    devices = harness.devices(num_replicas)
    with keras_dist.CentralStorageStrategy(devices, parameter).scope():
        return classifier(**kwargs)


def assert_same_state(ours, theirs):
    pairs = zip(variables_of(ours), variables_of(theirs), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got.value, want.value, rtol=1e-4, atol=1e-5)


def programs_of_fit(model, data, batch_size=16):
    """The programs that `fit` compiles: gradients, updates."""
    names = ("train_step", "optimizer_update")
    before = [e for name in names for e in programs(name)]
    model.fit(*data, batch_size=batch_size, verbose=0)
    return [[e for e in programs(n) if e not in before] for n in names]


@pytest.fixture
def transfers(monkeypatch):
    """How many arrays each transfer of a step moves: away, and back."""
    from keras_dist_jax.central import steps as central_steps

    counts = {"send": [], "bring": []}
    for name, counted in counts.items():
        original = getattr(central_steps, name)

        def count(arrays, *args, original=original, counted=counted):
            counted.append(len(arrays))
            return original(arrays, *args)

        monkeypatch.setattr(central_steps, name, count)
    return counts


def test_two_transfers_a_step_and_no_slots_among_them(data, transfers):
    model = make()
    model.fit(*data, batch_size=16, verbose=0)
    rest = len(model.variables) + len(model.metrics_variables)
    assert transfers == {"send": [rest] * 4, "bring": [rest] * 4}
    # Where losses are scaled, there is one scalar more.
    inner = keras.optimizers.SGD(momentum=0.9)
    model = make(optimizer=keras.optimizers.LossScaleOptimizer(inner))
    model.fit(*data, batch_size=64, verbose=0)
    assert transfers["send"][4:] == [rest + 1]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_collectives_as_with_mirrored_variables(data, num_replicas):
    with harness.scope(num_replicas):
        mirrored = classifier()
    ((theirs,), _) = programs_of_fit(mirrored, data)
    ((ours,), (update,)) = programs_of_fit(make("cpu:3", num_replicas), data)
    assert count_all_reduces(ours) == count_all_reduces(theirs)
    assert count_all_reduces(update) == 0


def test_what_devices_need_in_a_step(data):
    model = make(width=256)
    ((gradients,), (update,)) = programs_of_fit(model, data)
    stats = gradients.get_compiled_memory_stats()
    parameters = size_of(model.variables)
    activations = 16 * 256 * 4 * 8
    assert stats.argument_size_in_bytes < parameters + activations
    assert stats.output_size_in_bytes < parameters + activations
    # From JAX 0.11, XLA leaves the transposition of gradients that its
    # partitioner has reduced together to the end, and needs room for one more
    # copy of the largest.
    kernel = 256 * 256 * 4
    assert stats.temp_size_in_bytes < parameters + kernel + activations
    # An update works in the memory of the state, but for the rate of
    # learning, which nothing changes.
    state = size_of([*model.trainable_variables, *model.optimizer.variables])
    stats = update.get_compiled_memory_stats()
    assert stats.alias_size_in_bytes >= state - 8


def test_batches_of_another_shape_have_the_same_update(data):
    gradients, updates = programs_of_fit(make(), data, batch_size=25)
    assert len(gradients) == 2
    assert len(updates) == 1


class Reporting(keras.Sequential):
    """Its step looks at an optimizer and weights that it has updated."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        logs["norm"] = sum(ops.sum(ops.square(v)) for v in state[0])
        logs["largest"] = sum(ops.max(v) for v in state[2])
        return logs, state


class Alternating(keras.Sequential):
    """Its step computes with weights that it has just updated."""

    def train_step(self, state, data):
        _, state = super().train_step(state, data)
        return super().train_step(state, data)


@pytest.mark.parametrize("parameter", ["cpu:3", "cpu:0", ["cpu:2", "cpu:3"]])
@pytest.mark.parametrize("cls", [Reporting, Alternating])
def test_steps_that_use_what_they_have_updated(data, transfers, cls, parameter):
    plain, ours = classifier(cls=cls), make(parameter, cls=cls)
    expected = plain.fit(*data, **FIT).history
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = ours.fit(*data, **FIT).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    assert_same_state(ours, plain)
    told = [str(w.message) for w in caught if "optimizer's" in str(w.message)]
    assert len(told) == 1
    sent = [*variables_of(ours), *ours.metrics_variables]
    assert max(transfers["send"]) <= len(sent)


class Changing(keras.Sequential):
    """Its step changes gradients and weights before its one update."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables

        def loss_fn():
            return self.compute_loss(x=x, y=y, y_pred=self(x, training=True))

        loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
        variables[0].assign(variables[0] * 0.9)
        self.optimizer.apply([g * 0.5 for g in gradients], variables)
        return {"loss": loss}


@pytest.mark.parametrize("parameter", ["cpu:3", ["cpu:2", "cpu:3"]])
def test_a_step_of_the_users_leaves_its_update(data, transfers, parameter):
    ours = make(parameter, cls=Changing)
    with keras_dist.OneDeviceStrategy("cpu:0").scope():
        plain = classifier(cls=Changing)
    plain.fit(*data, **FIT)
    ours.fit(*data, **FIT)
    assert_same_state(ours, plain)
    assert max(transfers["send"]) <= len(ours.variables)


OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, use_ema=True
    ),
    "clipping": lambda: keras.optimizers.AdamW(
        0.01, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_apart_on_each_of_several_owners(data, name):
    plain = classifier(OPTIMIZERS[name]())
    ours = make(["cpu:2", "cpu:3"], optimizer=OPTIMIZERS[name]())
    plain.fit(*data, **FIT)
    _, updates = programs_of_fit(ours, data, 64)
    assert len(updates) == (2 if name == "clipping" else len(updates))
    ours = make(["cpu:2", "cpu:3"], optimizer=OPTIMIZERS[name]())
    ours.fit(*data, **FIT)
    assert_same_state(ours, plain)


class RateByRows(keras.Sequential):
    """Its update takes a constant that depends on the batch's rows."""

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y = data

        def loss_fn(trainable):
            found, _ = self.stateless_call(trainable, others, x)
            return ops.mean(ops.square(found - ops.one_hot(y, 3)))

        loss, gradients = jax.value_and_grad(loss_fn)(trainable)
        slots = list(slots)
        slots[1] = np.float32(0.01 * x.shape[0])
        trainable, slots = self.optimizer.stateless_apply(
            slots, gradients, trainable
        )
        return {"loss": loss}, (trainable, others, slots, metrics)


def test_constants_of_an_update_are_those_of_the_batch(data):
    def trained(strategy):
        with strategy.scope():
            model = classifier(keras.optimizers.SGD(0.5), cls=RateByRows)
        model.fit(*data, **FIT)
        return model

    plain = trained(keras_dist.OneDeviceStrategy("cpu:0"))
    assert_same_state(trained(harness.central(2)), plain)
