"""Models with several optimizers, wherever they keep them, train as on one."""

import functools

import keras
import pytest

import keras_dist
from parity import gans
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import central
from parity.harness import sharded
from parity.harness import strategy

WAYS = ["in_scope", "adopted", "optimizers_outside"]
STRATEGIES = {"mirrored": strategy, "central": central}
if BACKEND == "jax":  # others shard nothing in one process
    STRATEGIES["sharded"] = sharded
# Each kind of place, and each way to come to a strategy.
CASES = [("mirrored", "adopted", kind) for kind in gans.KINDS]
CASES += [(name, way, "dict") for name in STRATEGIES for way in WAYS]
if "sharded" in STRATEGIES:
    CASES += [("sharded", "in_scope", kind) for kind in gans.KINDS]


def one_device(_):
    return keras_dist.OneDeviceStrategy("cpu:0")


def made(make, way, kind="dict"):
    """The strategy, and a model that came to it in one of the `WAYS`."""
    own = make(2)
    if way == "adopted":
        return own, own.distribute(gans.made(kind))
    optimizers = (gans.adam(), gans.adam())
    with own.scope():
        given = optimizers if way == "optimizers_outside" else None
        return own, gans.made(kind, optimizers=given)


@functools.cache
def expected(kind):
    _, model = made(one_device, "in_scope", kind)
    gans.fit(model)
    return gans.state_of(model)


# With central storage, the second update computes with what the first wrote.
@pytest.mark.filterwarnings("ignore:`train_step` of model .* reads")
@pytest.mark.parametrize(("name", "way", "kind"), list(dict.fromkeys(CASES)))
def test_in_fit(name, way, kind):
    _, model = made(STRATEGIES[name], way, kind)
    gans.fit(model)
    assert_same(gans.state_of(model), expected(kind))


def trained_by_a_loop(make, way):
    own, model = made(make, way)

    def step(x):
        def loss():
            values = keras.ops.mean(model(x) ** 2, axis=-1)
            return keras_dist.compute_average_loss(values)

        parts = (model.g, model.d)
        for optimizer, part in zip(model.found(), parts, strict=True):
            variables = part.trainable_variables
            optimizer.apply(keras_dist.gradient(loss, variables), variables)

    batches = [gans.X[:10], gans.X[10:]]
    for batch in own.experimental_distribute_dataset(batches):
        own.run(step, (batch,))
    return gans.state_of(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_in_a_loop(name, way):
    found = trained_by_a_loop(STRATEGIES[name], way)
    assert_same(found, trained_by_a_loop(one_device, "in_scope"))


@pytest.mark.only_on("jax", reason="Others shard nothing in one process.")
@pytest.mark.parametrize("kind", gans.KINDS)
def test_sharded_state_in_files_of_keras(kind, tmp_path):
    path = tmp_path / "some.weights.h5"
    _, model = made(sharded, "in_scope", kind)
    gans.fit(model)
    # The optimizer of `compile` is built by the first step, and not used.
    for each in (model, again := made(sharded, "in_scope", kind)[1]):
        each.optimizer.build(each.trainable_variables)
    model.save_weights(path)
    again.load_weights(path)
    assert_same(gans.state_of(again), gans.state_of(model), rtol=0, atol=0)
    gans.fit(again)
    gans.fit(model)
    assert_same(gans.state_of(again), gans.state_of(model))
