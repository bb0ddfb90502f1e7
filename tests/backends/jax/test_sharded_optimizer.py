"""Optimizers whose state can be in parts have parts; others are refused.

What users may change of one that is built is known.
"""

import keras
import numpy as np
import pytest
from keras import optimizers

from keras_dist.errors import UnsupportedModelError
from keras_dist_jax.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist_jax.sharding.sharded_optimizer import check_gradients
from keras_dist_jax.sharding.shards import ReplicaShard
from keras_dist_jax.sharding.supported import check_optimizer
from keras_dist_jax.sharding.supported import settings_of
from keras_dist_jax.sharding.supported import settings_text
from keras_versions import excludes_when_built

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


class Clipped(OwnMomentum):
    """Its `apply` would be left out: parts are updated without it."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


class Own(optimizers.Adam):
    """It does not say whether it can be cut."""


class WithTable(OwnMomentum):
    """It has a slot that no config decides."""

    def build(self, variables):
        super().build(variables)
        self.table = self.add_variable(variables[0].shape[:1])


def test_optimizers_that_need_more_than_parts_are_refused():
    variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]], name="scale")
    for make, reason in (
        (optimizers.Lamb, "norms of each whole variable"),
        (optimizers.Adafactor, "rows and columns"),
        (optimizers.Muon, "orthogonal"),
        (WithTable, "can't be made again"),
        (optimizers.SGD, "'scale'"),
    ):
        variable.overwrite_with_gradient = make is optimizers.SGD
        optimizer = make(0.1)
        optimizer.build([variable])
        with pytest.raises(UnsupportedModelError, match=reason):
            ShardedOptimizer(optimizer, halved)
    check_optimizer(OwnMomentum(0.1))
    for optimizer, reason in (
        (optimizers.LossScaleOptimizer(optimizers.Lamb()), "Lamb"),
        (Own(), "is_elementwise = True"),
        (Clipped(0.1), "overrides `apply`"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            check_optimizer(optimizer)


def test_gradients_of_other_variables_are_refused():
    known, other = keras.Variable([1.0]), keras.Variable([2.0], name="other")
    optimizer = optimizers.SGD()
    optimizer.build([known])
    gradient = keras.ops.ones((1,))
    check_gradients(optimizer, [gradient], [known], [known])
    for gradients, of in (([gradient], [other]), ([gradient] * 2, [known])):
        with pytest.raises(ValueError, match="was built for other variables"):
            check_gradients(optimizer, gradients, of, [known])


def built(optimizer):
    v = keras.Variable(np.ones(3, "float32"), name="v")
    optimizer.build([v])
    return optimizer, [v]


def test_numbers_and_collections_of_them_are_settings():
    optimizer, _ = built(keras.optimizers.Adam())
    given = {
        "beta_1": np.float32(0.5),
        "betas": [0.1, (2, None)],
        "_pair": (5.0, "text"),
        "by_name": {"v": 0.25},
    }
    vars(optimizer).update(given)
    found = settings_of(optimizer)
    assert {name: found[name] for name in given} == given


def test_variables_and_notes_of_keras_are_none():
    optimizer, _ = built(keras.optimizers.SGD(momentum=0.9))
    vars(optimizer)["mixed"] = [1.0, keras.Variable(1.0)]
    found = settings_of(optimizer)
    assert "momentum" in found
    assert not {
        "momentums",
        "mixed",
        "name",
        "built",
        "_variables",
        "_trainable_variables_indices",
    } & set(found)


@excludes_when_built
def test_the_text_changes_with_a_setting_and_with_what_decays():
    optimizer, variables = built(keras.optimizers.AdamW())
    texts = [settings_text(optimizer, variables)]
    assert settings_text(optimizer, variables) == texts[0]
    optimizer.beta_2 = np.float64(0.5)
    texts.append(settings_text(optimizer, variables))
    optimizer.exclude_from_weight_decay(var_names=["v"])
    texts.append(settings_text(optimizer, variables))
    assert len(set(texts)) == 3
