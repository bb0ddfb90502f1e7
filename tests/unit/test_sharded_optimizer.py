"""Parts of variables, updated one by one, give plain Keras' numbers."""

import functools

import keras
import numpy as np
import pytest
from keras import optimizers

from keras_dist.errors import UnsupportedModelError
from keras_dist.sharding.sharded_optimizer import Parts
from keras_dist.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist.sharding.supported import check_optimizer

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]
STEPS = 5
new = functools.partial


def flat(count):
    """Divides a variable into flat parts."""
    return lambda variable: Parts(tuple(variable.shape), count)


def excluding(make):
    """An optimizer whose weights of one variable don't decay."""
    optimizer = make(weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_names=["second"])
    return optimizer


def loss_scale(inner, **options):
    options = {"initial_scale": 4.0, "dynamic_growth_steps": 2, **options}
    return optimizers.LossScaleOptimizer(inner(), **options)


OPTIMIZERS = {
    "sgd": new(optimizers.SGD, 0.1),
    "momentum": new(optimizers.SGD, 0.1, momentum=0.9, nesterov=True),
    "rmsprop": new(optimizers.RMSprop, 0.01, centered=True, momentum=0.5),
    "adam": new(optimizers.Adam, 0.01),
    "amsgrad": new(optimizers.Adam, 0.01, amsgrad=True),
    "adamw": new(optimizers.AdamW, 0.01, weight_decay=0.2),
    "adagrad": new(optimizers.Adagrad, 0.1),
    "adadelta": new(optimizers.Adadelta, 1.0),
    "adamax": new(optimizers.Adamax, 0.01),
    "nadam": new(optimizers.Nadam, 0.01),
    "ftrl": new(optimizers.Ftrl, 0.1, l1_regularization_strength=0.01),
    "lion": new(optimizers.Lion, 0.01),
    "schedule": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.2, 1, 0.7)
    ),
    "callable_rate": lambda: optimizers.SGD(lambda: 0.07),
    "clipnorm": new(optimizers.SGD, 0.1, clipnorm=0.5),
    "global_clipnorm": new(optimizers.Adam, 0.1, global_clipnorm=0.5),
    "clipvalue": new(optimizers.SGD, 0.1, clipvalue=0.3),
    "decay_mask": new(excluding, new(optimizers.Adam, 0.1)),
    "ema": new(
        optimizers.SGD,
        0.1,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=2,
    ),
    "accumulation": new(optimizers.Adam, 0.1, gradient_accumulation_steps=2),
    "accumulation_clipped": new(
        optimizers.Adam,
        0.1,
        gradient_accumulation_steps=2,
        global_clipnorm=0.5,
    ),
    "loss_scale_factor": new(
        optimizers.SGD, 0.1, loss_scale_factor=4.0, clipnorm=0.5
    ),
    "loss_scale": new(loss_scale, new(optimizers.Adam, 0.01)),
    "loss_scale_clipped": new(
        loss_scale, new(optimizers.SGD, 0.1, global_clipnorm=0.5)
    ),
    "loss_scale_nadam": new(loss_scale, new(optimizers.Nadam, 0.01)),
}
if hasattr(optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule_free"] = new(optimizers.ScheduleFreeAdamW, 0.01)


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


FEW = ["adam", "accumulation_clipped", "loss_scale_clipped"]
OPTIMIZERS["own"] = new(OwnMomentum, 0.1)


def variables():
    rng = np.random.default_rng(1)
    names = ["first", "second", "third", "fourth"]
    return [
        keras.Variable(rng.normal(size=shape).astype("float32"), name=name)
        for shape, name in zip(SHAPES, names, strict=True)
    ]


def gradients(step, overflow=False):
    rng = np.random.default_rng(100 + step)
    found = [rng.normal(size=shape).astype("float32") for shape in SHAPES]
    if overflow:
        found[0].flat[-1] = np.inf
    return [keras.ops.convert_to_tensor(g) for g in found]


def arrays(values):
    return [np.array(keras.ops.convert_to_numpy(value)) for value in values]


def in_parts(make, num_parts, steps):
    """Trains in parts; `steps` has the gradients of each step."""
    trained = variables()
    optimizer = make()
    optimizer.build(trained)
    sharded = ShardedOptimizer(optimizer, flat(num_parts))
    states, parameters = [], []
    kept = sharded.variables
    for part in range(num_parts):
        states.append(
            [
                keras.ops.copy(sharded.parts_of(i).split(v.value)[part])
                if sharded.is_sharded(i)
                else keras.ops.copy(v.value)
                for i, v in enumerate(kept)
            ]
        )
        parameters.append(
            [
                keras.ops.copy(p.split(v.value)[part])
                for p, v in zip(sharded.parts, trained, strict=True)
            ]
        )
    for full in steps:
        cut = [
            [
                None if g is None else p.split(g)[part]
                for g, p in zip(full, sharded.parts, strict=True)
            ]
            for part in range(num_parts)
        ]
        each = [sharded.amounts(states[i], cut[i]) for i in range(num_parts)]
        sums = [sum(amounts) for amounts in zip(*each, strict=True)]
        for part in range(num_parts):
            sharded.update_in_place(
                states[part], cut[part], parameters[part], sums
            )
    joined = [
        p.join(keras.ops.stack([own[i] for own in parameters]))
        for i, p in enumerate(sharded.parts)
    ]
    for i in range(len(kept)):
        values = [state[i] for state in states]
        if sharded.is_sharded(i):
            joined.append(sharded.parts_of(i).join(keras.ops.stack(values)))
            continue
        joined.append(values[0])
        for value in values[1:]:
            assert arrays([value]) == arrays([values[0]])
    return arrays(joined)


def plainly(make, steps):
    trained = variables()
    optimizer = make()
    optimizer.build(trained)
    for full in steps:
        pairs = [
            (g, v) for g, v in zip(full, trained, strict=True) if g is not None
        ]
        given, of = map(list, zip(*pairs, strict=True))
        optimizer.apply(given, of)
    kept = optimizer.variables
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    product = getattr(inner, "_u_product", None)
    if product is not None and all(v is not product for v in kept):
        kept = [*kept, product]
    return arrays([v.value for v in [*trained, *kept]])


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


needs_in_place = pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="only PyTorch's optimizers write into their variables' tensors",
)


@needs_in_place
@pytest.mark.parametrize(
    ("name", "num_parts"),
    [
        *((name, 3) for name in OPTIMIZERS),
        *((name, 1) for name in FEW),
        *((name, 2) for name in FEW),
    ],
)
def test_parts_give_plain_numbers(name, num_parts):
    make = OPTIMIZERS[name]
    steps = [gradients(step) for step in range(STEPS)]
    assert_same(in_parts(make, num_parts, steps), plainly(make, steps))


@needs_in_place
@pytest.mark.parametrize("name", ["adam", "ema", "global_clipnorm", "own"])
def test_some_variables_have_no_gradient(name):
    make = OPTIMIZERS[name]
    steps = [gradients(step) for step in range(3)]
    steps[1][0] = steps[2][3] = None
    assert_same(in_parts(make, 2, steps), plainly(make, steps))


@needs_in_place
@pytest.mark.parametrize(
    "name", ["loss_scale", "loss_scale_clipped", "loss_scale_nadam"]
)
def test_all_parts_skip_a_step_that_overflows(name):
    make = OPTIMIZERS[name]
    steps = [gradients(step, overflow=step == 1) for step in range(STEPS)]
    assert_same(in_parts(make, 3, steps), plainly(make, steps))


@needs_in_place
def test_settings_that_change_are_followed():
    trained = [keras.Variable([1.0, 2.0])]
    optimizer = optimizers.SGD(1.0)
    optimizer.build(trained)
    sharded = ShardedOptimizer(optimizer, flat(1))
    optimizer.clipvalue = 0.25
    values = [v.value for v in optimizer.variables]
    given = [keras.ops.convert_to_tensor([1.0, -1.0])]
    parameters = [keras.ops.copy(trained[0].value)]
    sharded.update_in_place(values, given, parameters, [])
    np.testing.assert_allclose(arrays(parameters)[0], [0.75, 2.25])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (4, 1, 2)])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_parts_are_joined_again(shape, num_parts):
    parts = Parts(shape, num_parts)
    value = np.arange(parts.num_elements, dtype="float32").reshape(shape) + 1
    cut = parts.split(keras.ops.convert_to_tensor(value))
    assert tuple(cut.shape) == (num_parts, parts.size)
    assert float(keras.ops.sum(cut)) == value.sum()
    joined = keras.ops.convert_to_numpy(parts.join(cut))
    assert joined.shape == shape and (joined == value).all()


def test_slots_are_told_from_scalars():
    optimizer = optimizers.Adam()
    optimizer.build(variables())
    sharded = ShardedOptimizer(optimizer, flat(2))
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
        ShardedOptimizer(optimizer, flat(2))
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
            self.table = self.add_variable((len(variables[0].shape),))

    optimizer = Own(0.1)
    optimizer.build([keras.Variable([[1.0, 2.0], [3.0, 4.0]])])
    with pytest.raises(UnsupportedModelError, match="can't be made again"):
        ShardedOptimizer(optimizer, flat(2))


def test_variables_that_are_overwritten_are_refused():
    variable = keras.Variable([1.0, 2.0], name="scale")
    variable.overwrite_with_gradient = True
    optimizer = optimizers.SGD()
    optimizer.build([variable])
    with pytest.raises(UnsupportedModelError, match="'scale'"):
        ShardedOptimizer(optimizer, flat(2))


def test_gradients_of_other_variables_are_refused():
    known, other = keras.Variable([1.0]), keras.Variable([2.0], name="other")
    optimizer = optimizers.SGD()
    optimizer.build([known])
    sharded = ShardedOptimizer(optimizer, flat(2))
    gradient = keras.ops.ones((1,))
    with pytest.raises(ValueError, match="other"):
        sharded.checked([gradient], [other])
    with pytest.raises(ValueError, match="No gradients"):
        sharded.checked([None])
    assert sharded.checked([gradient], [known])[0] is gradient
