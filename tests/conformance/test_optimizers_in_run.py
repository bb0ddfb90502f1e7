"""Optimizers in `run` step on the sum of gradients, on all copies alike."""

import functools

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import raw
from conformance.helpers import replica_id
from conformance.helpers import splits
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.variables import copies
from conformance.variables import current
from conformance.variables import parts
from conformance.variables import refuses
from conformance.variables import variable
from parity.harness import central
from parity.harness import sharded
from parity.harness import strategy
from sharded.helpers import shards


def _made(strategy, make_optimizer, *initials):
    """An optimizer, and variables with these values."""
    with strategy.scope():
        optimizer = make_optimizer()
        variables = [
            keras.Variable(np.asarray(x, "float32"), name=f"v{i}")
            for i, x in enumerate(initials)
        ]
        optimizer.build(variables)
    return optimizer, variables


def _apply(strategy, optimizer, grads, variables):
    strategy.run(lambda: optimizer.apply([tensor(g) for g in grads], variables))


def _held_by_all(strategy, v):
    """What the copies hold, where they are equal."""
    first, *others = copies(v)
    assert others == [first] * (strategy.num_replicas_in_sync - 1)
    return np.asarray(first)


def _moving_average(api, v, value, decay):
    """The update of a moving average, written for either context."""
    context = api.get_replica_context()
    if context is not None:
        value = context.all_reduce("MEAN", value)
    v.assign(current(v) * decay + value * (1 - decay))


@contract(196, 198)
@pytest.mark.parametrize("context", ["cross", "replica"])
def test_moving_average(api, mirrored, context):
    """Of the mean of the replicas' values, twice."""
    n = mirrored.num_replicas_in_sync
    v = variable(api, mirrored, [10.0, 11.0], aggregation="mean")
    mean = np.asarray([1.0, 2.0])
    if context == "replica":
        mean += np.asarray([1.0, -1.0]) * (n - 1) / 2

    def step():
        r = float(replica_id(api)) if context == "replica" else 0.0
        _moving_average(api, v, tensor([1.0 + r, 2.0 - r]), 0.25)

    expected = np.asarray([10.0, 11.0])
    for _ in range(2):
        if context == "replica":
            mirrored.run(step)
        else:
            with mirrored.scope():
                step()
        expected = expected / 4 + 0.75 * mean
        np.testing.assert_allclose(
            _held_by_all(mirrored, v), expected, rtol=1e-6
        )


@contract(198, native=False)
def test_components_are_no_value_in_cross_replica_context(api, two):
    v = variable(api, two, [10.0, 11.0], aggregation="mean")
    value = parts(two, [[1.0, 2.0], [3.0, 4.0]])
    with two.scope(), refuses((TypeError, ValueError), v):
        _moving_average(api, v, value, 0.25)


@contract(199, 200)
@pytest.mark.parametrize("context", ["cross", "replica"])
def test_moving_average_of_a_variable(api, two, context):
    """Before and after the variable changes."""
    w = variable(api, two, 1.0, aggregation="mean")
    average = variable(api, two, 1.0, aggregation="mean")

    def steps():
        _moving_average(api, average, current(w), 0.8)
        w.assign_sub(0.5)
        _moving_average(api, average, current(w), 0.8)

    if context == "replica":
        two.run(steps)
    else:
        with two.scope():
            steps()
    np.testing.assert_allclose(_held_by_all(two, average), 0.9, rtol=1e-6)


@contract(203)
def test_gradients_are_summed(api, two):
    optimizer, (v, w) = _made(
        two, lambda: keras.optimizers.SGD(0.1), [0.0, 0.0], 0.0
    )
    grads = [parts(two, [[1.0, 1.0], [2.0, 2.0]]), parts(two, [1.0, 3.0])]
    two.run(lambda *gs: optimizer.apply(list(gs), [v, w]), tuple(grads))
    np.testing.assert_allclose(_held_by_all(two, v), [-0.3, -0.3], rtol=1e-6)
    np.testing.assert_allclose(_held_by_all(two, w), -0.4, rtol=1e-6)


@contract(203, native=False)
def test_a_gradient_from_outside_counts_on_each_replica(api, mirrored):
    n = mirrored.num_replicas_in_sync
    optimizer, (v,) = _made(
        mirrored, lambda: keras.optimizers.SGD(1.0), [0.0, 0.0]
    )
    grad = tensor([1.0, 2.0])
    mirrored.run(lambda: optimizer.apply([grad], [v]))
    assert _held_by_all(mirrored, v).tolist() == [-n, -2.0 * n]


@contract(203)
def test_one_device_has_one_gradient(api, single):
    optimizer, (v,) = _made(
        single, lambda: keras.optimizers.SGD(0.1), [0.0, 0.0]
    )
    _apply(single, optimizer, [[1.0, 1.0]], [v])
    np.testing.assert_allclose(_held_by_all(single, v), [-0.1, -0.1])


@contract(206)
def test_variables_that_do_not_decay(api, two):
    with two.scope():
        listed, beside = keras.Variable(4.0), keras.Variable(2.0)
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.004)
        optimizer.exclude_from_weight_decay(var_list=[listed])
        optimizer.build([listed, beside])
    for _ in range(3):
        _apply(two, optimizer, [0.0, 0.0], [listed, beside])
    np.testing.assert_allclose(_held_by_all(two, beside), 1.9760959, rtol=1e-6)
    assert copies(listed) == [4.0, 4.0]


@contract(208, native=False)
def test_gradients_that_cancel_are_not_clipped_before(api, two):
    optimizer, (v,) = _made(
        two, lambda: keras.optimizers.SGD(1.0, clipvalue=1.0), [0.0]
    )
    grad = parts(two, [[100.0], [-99.5]])
    two.run(lambda g: optimizer.apply([g], [v]), (grad,))
    np.testing.assert_allclose(_held_by_all(two, v), [-0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "make", [strategy, central, pytest.param(sharded, marks=[shards, splits])]
)
def test_variables_need_not_be_named_again(make):
    two = make(2)
    optimizer, (v, w) = _made(two, lambda: keras.optimizers.SGD(0.5), 1.0, 2.0)

    def step():
        optimizer.apply([tensor(1.0), tensor(2.0)])
        # The new value, in the same function.
        return v + w

    seen = two.run(step)
    assert [float(each) for each in local(seen)] == [0.0, 0.0]
    assert (_held_by_all(two, v), _held_by_all(two, w)) == (0.0, 0.0)


@contract(211, native=False)
@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="Keras' optimizer on TensorFlow has no stateless step in a strategy",
)
def test_stateless_steps(api, two):
    optimizer, (v,) = _made(two, lambda: keras.optimizers.SGD(0.1), [1.0, 1.0])
    values, _ = optimizer.stateless_apply(
        [x.value for x in optimizer.variables],
        [tensor([1.0, 2.0])],
        # Keras on PyTorch steps on the tensor itself.
        [keras.ops.copy(v.value)],
    )
    np.testing.assert_allclose(to_numpy(values[0]), [0.9, 0.8], rtol=1e-6)
    assert copies(v) == [[1.0, 1.0]] * 2


def _decayed():
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.004)
    optimizer.exclude_from_weight_decay(var_names=["v1"])
    return optimizer


def _sgd(*args, **options):
    return functools.partial(keras.optimizers.SGD, *args, **options)


OPTIMIZERS = {
    "momentum": _sgd(0.01, 0.9),
    "nesterov": _sgd(0.01, 0.9, True),
    "nesterov without momentum": _sgd(0.01, 0.0, True),
    "decayed": _decayed,
    "clipnorm": _sgd(1.0, clipnorm=1.0),
    "global_clipnorm": _sgd(1.0, global_clipnorm=1.0),
    "clipvalue": _sgd(1.0, clipvalue=1.0),
    "average": _sgd(0.5, use_ema=True, ema_overwrite_frequency=3),
    "accumulated": _sgd(1.0, gradient_accumulation_steps=3),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
}

if keras.backend.backend() != "jax":
    # On JAX, Keras has no such steps outside of a compiled function.
    OPTIMIZERS["loss_scale"] = lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0
    )


@contract(203, 205, 206, 207, 208, 209, 210, native=False)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_the_sum(api, mirrored, name):
    n = mirrored.num_replicas_in_sync
    initials = [1.0, 2.0], [[3.0], [4.0]]
    alone, plain = _made(api.get_strategy(), OPTIMIZERS[name], *initials)
    optimizer, variables = _made(mirrored, OPTIMIZERS[name], *initials)
    for step in range(1, 5):
        first = [[float(r + step), -float(r)] for r in range(n)]
        second = [[[0.5 * r], [2.0]] for r in range(n)]
        sums = [tensor(np.sum(each, axis=0)) for each in (first, second)]
        alone.apply(sums, plain)
        shares = parts(mirrored, first), parts(mirrored, second)
        mirrored.run(lambda *g: optimizer.apply([*g], variables), shares)
        ours = [*variables, *optimizer.variables]
        for own, other in zip(ours, [*plain, *alone.variables], strict=True):
            np.testing.assert_allclose(
                _held_by_all(mirrored, own), to_numpy(other), rtol=1e-5
            )


@contract(203)
def test_an_optimizer_is_built_on_the_first_call(api, two):
    with two.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        v = keras.Variable([1.0, 1.0])
    _apply(two, optimizer, [[1.0, 1.0]], [v])
    np.testing.assert_allclose(_held_by_all(two, v), [0.8, 0.8], rtol=1e-6)
    for slot in optimizer.variables:
        assert raw(api, slot).distribute_strategy is two
    assert [len(copies(slot)) for slot in optimizer.variables] == [2] * len(
        optimizer.variables
    )


@contract(203, native=False)
def test_an_optimizer_of_another_strategy_is_refused(api, two):
    with two.scope():
        optimizer = keras.optimizers.SGD(0.1)
    other = api.MirroredStrategy(["cpu:2", "cpu:3"])
    with other.scope():
        v = keras.Variable(1.0)
    with refuses(keras_dist.StrategyMismatchError, v):
        _apply(other, optimizer, [1.0], [v])
