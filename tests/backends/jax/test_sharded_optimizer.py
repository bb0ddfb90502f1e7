"""JAX: optimizers whose state can be in parts, and those that are refused."""

import keras
import numpy as np
import pytest
from keras import optimizers

from keras_dist.errors import UnsupportedModelError
from keras_dist_jax.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist_jax.sharding.sharded_optimizer import check_gradients
from keras_dist_jax.sharding.shards import ReplicaShard
from keras_dist_jax.sharding.supported import check_optimizer

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]


def halved(variable):
    """Divides a variable along its first axis."""
    shape = tuple(variable.shape)
    part = (-(-shape[0] // 2), *shape[1:]) if shape else shape
    return ReplicaShard(shape, part)


class OwnMomentum(optimizers.Optimizer):
    """An optimizer of a user's own, which says that it can be cut."""

    is_elementwise = True

    def build(self, variables):
        super().build(variables)
        self.speeds = self.add_optimizer_variables(variables, "speed")

    def update_step(self, gradient, variable, learning_rate):
        speed = self.speeds[self._get_variable_index(variable)]
        self.assign(speed, 0.5 * speed.value + gradient)
        self.assign_sub(variable, learning_rate * speed.value)


def variables():
    rng = np.random.default_rng(1)
    names = ["first", "second", "third", "fourth"]
    return [
        keras.Variable(rng.normal(size=shape).astype("float32"), name=name)
        for shape, name in zip(SHAPES, names, strict=True)
    ]


def test_slots_are_told_from_scalars():
    optimizer = optimizers.Adam()
    optimizer.build(variables())
    sharded = ShardedOptimizer(optimizer, halved)
    kinds = [sharded.is_sharded(i) for i in range(len(optimizer.variables))]
    assert kinds == [False, False] + [True] * 8
    assert [sharded.parts_of(i).shape for i in (2, 4, 6, 8)] == SHAPES
    assert sharded.is_of(optimizer)
    assert not sharded.is_of(optimizers.Adam())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (optimizers.Lamb, "norms of each whole variable"),
        (optimizers.Adafactor, "rows and columns"),
        (optimizers.Muon, "orthogonal"),
    ],
)
def test_optimizers_that_need_whole_variables_are_refused(make, reason):
    optimizer = make()
    optimizer.build([keras.Variable([[1.0, 2.0], [3.0, 4.0]])])
    with pytest.raises(UnsupportedModelError, match=reason):
        ShardedOptimizer(optimizer, halved)
    scaled = optimizers.LossScaleOptimizer(make())
    with pytest.raises(UnsupportedModelError, match=make.__name__):
        check_optimizer(scaled)


def test_an_own_optimizer_that_says_nothing_is_refused():
    class Own(optimizers.Adam):
        pass

    with pytest.raises(UnsupportedModelError, match="is_elementwise = True"):
        check_optimizer(Own())
    check_optimizer(OwnMomentum(0.1))


def test_an_own_apply_is_refused():
    """It would be left out: parts are updated without it."""

    class Clipped(OwnMomentum):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    with pytest.raises(UnsupportedModelError, match="overrides `apply`"):
        check_optimizer(Clipped(0.1))


def test_slots_that_no_config_decides_are_refused():
    class Own(OwnMomentum):
        def build(self, variables):
            super().build(variables)
            self.table = self.add_variable(variables[0].shape[:1])

    optimizer = Own(0.1)
    optimizer.build([keras.Variable([[1.0, 2.0], [3.0, 4.0]])])
    with pytest.raises(UnsupportedModelError, match="can't be made again"):
        ShardedOptimizer(optimizer, halved)


def test_variables_that_are_overwritten_are_refused():
    variable = keras.Variable([1.0, 2.0], name="scale")
    variable.overwrite_with_gradient = True
    optimizer = optimizers.SGD()
    optimizer.build([variable])
    with pytest.raises(UnsupportedModelError, match="'scale'"):
        ShardedOptimizer(optimizer, halved)


def test_gradients_of_other_variables_are_refused():
    known, other = keras.Variable([1.0]), keras.Variable([2.0], name="other")
    optimizer = optimizers.SGD()
    optimizer.build([known])
    gradient = keras.ops.ones((1,))
    check_gradients(optimizer, [gradient], [known], [known])
    for gradients, of in (([gradient], [other]), ([gradient] * 2, [known])):
        with pytest.raises(ValueError, match="was built for other variables"):
            check_gradients(optimizer, gradients, of, [known])
