"""Optimizers in replica context, and averages that move."""

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


@contract(196)
def test_moving_average_of_the_replicas_mean(api, mirrored):
    n = mirrored.num_replicas_in_sync
    v = variable(api, mirrored, [10.0, 11.0], aggregation="mean")

    def step():
        r = float(replica_id(api))
        _moving_average(api, v, tensor([1.0 + r, 2.0 - r]), 0.25)

    mirrored.run(step)
    mean = np.asarray([1.0, 2.0]) + np.asarray([1.0, -1.0]) * (n - 1) / 2
    np.testing.assert_allclose(
        _held_by_all(mirrored, v), [10 / 4, 11 / 4] + 0.75 * mean, rtol=1e-6
    )


@contract(198)
def test_moving_average_in_cross_replica_context(api, two):
    v = variable(api, two, [10.0, 11.0], aggregation="mean")
    with two.scope():
        _moving_average(api, v, tensor([1.0, 2.0]), 0.25)
        np.testing.assert_allclose(
            _held_by_all(two, v), [2.5 + 0.75, 2.75 + 1.5], rtol=1e-6
        )
        _moving_average(api, v, tensor([1.0, 2.0]), 0.25)
    expected = [
        10.0 * 0.0625 + 1.0 * 0.9375,
        11.0 * 0.0625 + 2.0 * 0.9375,
    ]
    np.testing.assert_allclose(_held_by_all(two, v), expected, rtol=1e-6)


@contract(198, native=False)
def test_components_are_no_value_in_cross_replica_context(api, two):
    v = variable(api, two, [10.0, 11.0], aggregation="mean")
    value = parts(two, [[1.0, 2.0], [3.0, 4.0]])
    with two.scope(), refuses((TypeError, ValueError), v):
        _moving_average(api, v, value, 0.25)


@contract(199)
@pytest.mark.parametrize("context", ["cross", "replica"])
def test_moving_average_of_a_variable(api, two, context):
    average = variable(api, two, 4.0, aggregation="mean")
    followed = variable(api, two, 8.0, aggregation="mean")
    if context == "replica":
        two.run(lambda: _moving_average(api, average, current(followed), 0.5))
    else:
        with two.scope():
            _moving_average(api, average, current(followed), 0.5)
    assert copies(average) == [6.0, 6.0]


@contract(200)
@pytest.mark.parametrize("context", ["cross", "replica"])
def test_exponential_moving_average(api, two, context):
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


@contract(205)
def test_one_step_with_momentum(api, two):
    optimizer, (v,) = _made(
        two,
        lambda: keras.optimizers.SGD(0.5, momentum=0.06),
        [1.0, 2.0, 3.0, 4.0],
    )
    _apply(two, optimizer, [[1.0, 6.0, 7.0, 2.0]], [v])
    np.testing.assert_allclose(
        _held_by_all(two, v), [0.0, -4.0, -4.0, 2.0], atol=1e-5
    )
    assert copies(optimizer.iterations) == [1, 1]


@contract(206)
def test_weight_decay(api, two):
    def make():
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.004)
        optimizer.exclude_from_weight_decay(var_names=["v1"])
        return optimizer

    optimizer, variables = _made(two, make, 2.0, 3.0)
    with two.scope():
        listed, beside = keras.Variable(4.0), keras.Variable(2.0)
        other = keras.optimizers.SGD(1.0, weight_decay=0.004)
        other.exclude_from_weight_decay(var_list=[listed])
        other.build([listed, beside])
    for _ in range(3):
        _apply(two, optimizer, [0.0, 0.0], variables)
        _apply(two, other, [0.0, 0.0], [listed, beside])
    decayed, named = variables
    for each in (decayed, beside):
        np.testing.assert_allclose(
            _held_by_all(two, each), 1.9760959, rtol=1e-6
        )
    assert copies(named) == [3.0, 3.0]
    assert copies(listed) == [4.0, 4.0]


@contract(207)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nesterov(api, mirrored, momentum):
    n = mirrored.num_replicas_in_sync
    optimizer, (v,) = _made(
        mirrored,
        lambda: keras.optimizers.SGD(0.01, momentum=momentum, nesterov=True),
        np.ones(10),
    )
    grads = np.arange(0.1, 1.1, 0.1)
    expected, velocity = np.ones(10), np.zeros(10)
    for _ in range(5):
        _apply(mirrored, optimizer, [grads], [v])
        velocity = momentum * velocity - 0.01 * n * grads
        expected = expected + momentum * velocity - 0.01 * n * grads
        np.testing.assert_allclose(
            _held_by_all(mirrored, v), expected, rtol=1e-5
        )


@contract(208, native=False)
@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ({"clipnorm": 1.0}, [-(0.5**0.5)] * 2),
        ({"global_clipnorm": 1.0}, [-(0.5**0.5)] * 2),
        ({"clipvalue": 1.0}, [-1.0, -1.0]),
    ],
)
def test_sums_are_clipped(api, mirrored, clip, expected):
    optimizer, (v,) = _made(
        mirrored, lambda: keras.optimizers.SGD(1.0, **clip), [0.0, 0.0]
    )
    _apply(mirrored, optimizer, [[100.0, 100.0]], [v])
    np.testing.assert_allclose(_held_by_all(mirrored, v), expected, rtol=1e-6)


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


@contract(209)
def test_average_of_variables_overwrites_them(api, two):
    optimizer, (v,) = _made(
        two,
        lambda: keras.optimizers.SGD(
            0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
        ),
        [3.0, 4.0, 5.0, 6.0],
    )
    ones = np.ones(4)
    for expected in ([2, 3, 4, 5], [1, 2, 3, 4], [1.71, 2.71, 3.71, 4.71]):
        _apply(two, optimizer, [ones], [v])
        np.testing.assert_allclose(_held_by_all(two, v), expected, rtol=1e-5)


@contract(210)
def test_accumulated_gradients(api, two):
    optimizer, (v,) = _made(
        two,
        lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=3),
        [[1.0, 2.0], [3.0, 4.0]],
    )
    grads = [[[1.0, 1.0], [2.0, 2.0]]]
    for iterations, expected in [
        (0, [[1.0, 2.0], [3.0, 4.0]]),
        (0, [[1.0, 2.0], [3.0, 4.0]]),
        (1, [[-1.0, 0.0], [-1.0, 0.0]]),
    ]:
        _apply(two, optimizer, grads, [v])
        np.testing.assert_allclose(
            _held_by_all(two, v), expected, atol=1e-5, rtol=1e-6
        )
        assert int(to_numpy(optimizer.iterations)) == iterations


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


OPTIMIZERS = {
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


@contract(203, native=False)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_the_sum(api, mirrored, name):
    n = mirrored.num_replicas_in_sync
    alone = OPTIMIZERS[name]()
    plain = keras.Variable([1.0, 2.0])
    optimizer, (v,) = _made(mirrored, OPTIMIZERS[name], [1.0, 2.0])
    for step in range(1, 4):
        shares = [[float(r + step), -float(r)] for r in range(n)]
        alone.apply([tensor(np.sum(shares, axis=0))], [plain])
        mirrored.run(
            lambda g: optimizer.apply([g], [v]), (parts(mirrored, shares),)
        )
    np.testing.assert_allclose(
        _held_by_all(mirrored, v), to_numpy(plain), rtol=1e-5
    )
    for ours, theirs in zip(optimizer.variables, alone.variables, strict=True):
        np.testing.assert_allclose(
            _held_by_all(mirrored, ours), to_numpy(theirs), rtol=1e-5
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


@contract(203, native=False)
def test_replicas_read_what_was_stepped(api, two):
    optimizer, (v,) = _made(two, lambda: keras.optimizers.SGD(1.0), 0.0)

    def step():
        optimizer.apply([tensor(1.0)], [v])
        return current(v)

    assert [x.tolist() for x in local(two.run(step))] == [-2.0, -2.0]
