"""Loops of users have one device's numbers where variables are in parts."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from parity.harness import assert_same
from parity.harness import dtype_policy
from sharded.helpers import mirrored
from sharded.helpers import sharded
from sharded.helpers import shards
from steps import train_step

pytestmark = shards
DEVICES = [f"cpu:{index}" for index in range(4)]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 40)).astype("float32")
Y = RNG.normal(size=(12, 7)).astype("float32")
optimizers = keras.optimizers
OPTIMIZERS = {
    "one norm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "a norm for each": lambda: optimizers.SGD(
        0.01, momentum=0.9, clipnorm=0.05
    ),
    "accumulation": lambda: optimizers.AdamW(
        0.01, gradient_accumulation_steps=2, use_ema=True
    ),
    "a variable outside": lambda: optimizers.Nadam(0.01),
    "scaled": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, clipnorm=0.1),
        initial_scale=8.0,
        dynamic_growth_steps=2,
    ),
    "scaled too far": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.01, momentum=0.9), initial_scale=2.0**127
    ),
}
WHOLE = {"lamb": lambda: optimizers.Lamb(0.01)}
KINDS = {
    "state": {"optimizer_state": "sharded"},
    "variables": {"variables": "sharded"},
    "variables, two devices a replica": {
        "variables": "sharded",
        "logical_devices": 2,
    },
}
CASES = [
    (kind, name)
    for kind in KINDS
    for name in (OPTIMIZERS if kind == "state" else {**OPTIMIZERS, **WHOLE})
]


def trained(strategy, name, names_few=False):
    """What four steps make of a model and of its optimizer."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((40,)),
                layers.Dense(
                    37,
                    activation="tanh",
                    kernel_constraint=keras.constraints.MaxNorm(0.5),
                ),
                layers.Dense(33),
                layers.Dense(7),
            ]
        )
        optimizer = {**OPTIMIZERS, **WHOLE}[name]()
        optimizer.build(model.trainable_variables)

    def losses_of(x, y):
        return ops.sum(ops.square(model(x, training=True) - y), axis=-1)

    first = 2 if names_few else 0
    step = keras_dist.function(train_step(model, optimizer, losses_of, first))
    data = strategy.experimental_distribute_dataset([(X, Y)] * 4)
    for batch in data:
        strategy.run(step, batch)
    found = [*model.variables, *optimizer.variables]
    return {
        str(index): np.array(ops.convert_to_numpy(variable))
        for index, variable in enumerate(found)
    }


def made(kind):
    if kind == "state":  # which workers replace
        return sharded(len(DEVICES))
    return keras_dist.MirroredStrategy(DEVICES, **KINDS[kind])


@functools.cache
def on_one_device(name, names_few=False):
    strategy = keras_dist.OneDeviceStrategy("cpu:0")
    return trained(strategy, name, names_few)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_numbers_of_one_device(kind, name):
    assert_same(trained(made(kind), name), on_one_device(name))


def test_an_update_of_some_variables():
    strategy = made("state")
    found = trained(strategy, "one norm", names_few=True)
    assert_same(found, on_one_device("one norm", names_few=True))


def _of_two_replicas(options):
    count = 2 * options.get("logical_devices", 1)
    return keras_dist.MirroredStrategy(DEVICES[:count], **options)


def _assigned_in_a_loop(v, optimizer, x):
    def once(_, x):
        v.assign_add(ops.ones(2048))
        return x + v[0]

    return ops.fori_loop(0, 3, once, x)


def _trained_in_a_scan(v, optimizer, x):
    def once(carry, _):
        loss, grads = keras_dist.value_and_grad(
            lambda: ops.sum(ops.square(v - x)) / 8, [v]
        )
        optimizer.apply(grads, [v])
        return carry, loss

    return ops.sum(ops.scan(once, 0.0, length=3)[1])


def _updated_and_read_in_a_branch(v, optimizer, x):
    def update():
        optimizer.apply([ops.ones(2048)], [v])
        return v[0] * 1.0

    return ops.cond(x > 0.0, update, lambda: v[1] * 7.0) + v[2]


def _read_in_one_branch_updated_in_another(v, optimizer, x):
    def update():
        optimizer.apply([ops.ones(2048)], [v])
        return 0.0

    return ops.cond(x < 0.0, lambda: v[0] * 1.0, update) + v[2]


def _half_as_large(v, optimizer, x):
    def halve():
        v.assign(v / 2.0)
        return 0.0

    return ops.cond(x > 0.0, halve, lambda: 0.0) + v[2]


def _left_by(fn, options):
    """What a function gives, three times, and what it leaves."""
    strategy = _of_two_replicas(options)
    with strategy.scope():
        v = keras.Variable(np.linspace(-1, 2, 2048).astype("float32"))
        optimizer = optimizers.Adam(0.1)
        optimizer.build([v])
    step = keras_dist.function(lambda x: fn(v, optimizer, x))
    found = []
    for x in (1.0, -1.0, 2.0):
        result = strategy.run(step, (ops.convert_to_tensor(np.float32(x)),))
        found.append(float(strategy.experimental_local_results(result)[0]))
    return found, ops.convert_to_numpy(v.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fn",
    [
        _assigned_in_a_loop,
        _trained_in_a_scan,
        _updated_and_read_in_a_branch,
        _read_in_one_branch_updated_in_another,
        _half_as_large,
    ],
)
def test_loops_and_branches_that_assign(kind, fn):
    found, ours = _left_by(fn, KINDS[kind])
    expected, whole = _left_by(fn, {})
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)


def _trained_with(policy, strategy):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with dtype_policy(policy), strategy.scope():
        model = keras.Sequential(
            [keras.Input((40,)), layers.Dense(64), layers.Dense(7)]
        )
        optimizer = optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def losses_of(x):
        return ops.mean(ops.square(ops.cast(model(x), "float32")), axis=-1)

    step = keras_dist.function(train_step(model, optimizer, losses_of))
    for _ in range(2):
        strategy.run(step, (ops.convert_to_tensor(X),))
    return [ops.convert_to_numpy(v.value) for v in model.variables]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision(kind, policy):
    of_parts = _of_two_replicas(KINDS[kind]) if kind != "state" else sharded(2)
    found = _trained_with(policy, of_parts)
    expected = _trained_with(policy, mirrored(2))
    for ours, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-2, atol=1e-3)
