"""`fit` sums gradients over CPU devices in the shape of their variables."""

import itertools
import operator

import jax
import keras
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun
from keras import layers
from keras import ops

from backends.jax import late_transposition
from backends.jax import measures
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.placement import layout
from keras_dist_jax.programs.jaxprs import inner
from keras_dist_jax.programs.jaxprs import rewritten
from keras_dist_jax.programs.products import untransposed
from parity import harness
from parity.harness import assert_same
from parity.harness import state_of

ROWS, LENGTH, WIDTH, CLASSES, DEPTH = 16, 4, 40, 4, 3
KINDS = [harness.strategy, harness.sharded, harness.sharded_variables]


def few_ones(shape, dtype=None):
    """Initial weights with which float32 computes without rounding."""
    drawn = np.random.default_rng(len(shape)).integers(-20, 21, shape)
    return ops.convert_to_tensor(np.trunc(drawn / 20), dtype)


def once(block, x, kernel):
    return block(x, kernel)


def again(block, x, kernel):
    return jax.checkpoint(block)(x, kernel)


def in_a_scan(block, x, kernels):
    def body(x, kernel):
        return block(x, kernel), None

    return jax.lax.scan(jax.checkpoint(body), x, kernels)[0]


class Tied(layers.Layer):
    """A kernel that is used twice, once transposed."""

    def __init__(self, way, *shape):
        super().__init__()
        self.way, self.shape = way, shape

    def build(self, shape):
        self.kernel = self.add_weight(shape=self.shape, initializer=few_ones)

    def call(self, x):
        def block(x, kernel):
            return x + ops.relu(x @ kernel) @ kernel.T

        return self.way(block, x, self.kernel.value)


def stack():
    """Layers of which no two kernels have the same number of elements."""
    options = {"kernel_initializer": few_ones}
    return [
        keras.Input((LENGTH, WIDTH)),
        layers.Dense(32, activation="relu", **options),
        layers.EinsumDense("abc,cde->abde", (LENGTH, 2, 24), **options),
        layers.EinsumDense("abcd,cde->abe", (LENGTH, WIDTH), **options),
        Tied(once, WIDTH, 56),
        Tied(again, WIDTH, 44),
        Tied(in_a_scan, DEPTH, WIDTH, 52),
        layers.Flatten(),
        layers.Dense(CLASSES, **options),
    ]


def trained(make_strategy, make=stack, optimizer=None, steps=1, num_replicas=2):
    """A model's state after some steps; shapes of what a step sums."""
    keras.utils.set_random_seed(0)
    with make_strategy(num_replicas).scope():
        model = keras.Sequential(make())
        model.compile(optimizer or keras.optimizers.SGD(2.0**-8), "mse")
    rng = np.random.default_rng(0)
    shape = (steps * ROWS, *model.input_shape[1:])
    x = rng.integers(-1, 2, shape).astype("float32")
    y = rng.integers(-1, 2, (len(x), *model.output_shape[1:])).astype("float32")
    text = measures.text_of(measures.step_of(model, x, y, ROWS))
    return state_of(model), late_transposition.sums_of(text)


def kernels_of(state):
    """Shapes of the kernels in a state, or of their slices in a scan."""
    shapes = [value.shape for value in state.values()]
    return [
        shape[1:] if shape[:2] == (DEPTH, WIDTH) else shape
        for shape in shapes
        if len(shape) > 1
    ]


def has_order_of(summed, shape):
    """Tells whether a sum is a variable's gradient, but for joined axes."""
    found, known = (
        {*itertools.accumulate(each, operator.mul)} for each in (summed, shape)
    )
    return found - {1} <= known


@pytest.fixture
def without(monkeypatch):
    """Makes the next models leave gradients as JAX computes them."""
    return lambda: monkeypatch.setattr(layout, "untransposed", lambda p: p)


def in_wrong_shapes(state, sums):
    """The kernels in a state whose gradients are summed transposed."""
    return {
        shape
        for shape, summed in itertools.product(kernels_of(state), sums)
        if np.prod(summed) == np.prod(shape) and not has_order_of(summed, shape)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_summed_in_the_shape_of_their_variables(kind, without):
    """And their bits are those that JAX computes without the exchange."""
    state, sums = trained(kind)
    kernels = kernels_of(state)
    assert {*map(np.prod, kernels)} <= {*map(np.prod, sums)}
    assert not in_wrong_shapes(state, sums)
    without()
    plain, sums = trained(kind)
    assert len(in_wrong_shapes(plain, sums)) >= 4
    # All arithmetic was exact, in any order.
    for name, value in state.items():
        np.testing.assert_array_equal(value, plain[name], name)


def rounding():
    """Layers whose results are rounded."""
    return [
        keras.Input((LENGTH, WIDTH)),
        layers.Dense(24, activation="gelu"),
        layers.LSTM(20, return_sequences=True),
        layers.EinsumDense("abc,cde->abde", (LENGTH, 2, 12)),
        layers.Reshape((LENGTH, 24)),
        layers.GRU(CLASSES),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_of_adam(kind, without):
    """Sums over two axes are in another order: that of one device."""
    state, _ = trained(kind, rounding, "adam", steps=3, num_replicas=4)
    without()
    plain, _ = trained(kind, rounding, "adam", steps=3, num_replicas=4)
    assert_same(state, plain, 1e-5)


def test_unequal_shares():
    with harness.strategy(2).scope():
        model = keras.Sequential([keras.Input((7,)), layers.Dense(3)])
        model.compile("sgd", "mse")
    program = measures.step_of(model, np.ones((5, 7)), np.ones((5, 3)))
    summed = late_transposition.sums_of(measures.text_of(program))
    assert (7, 3) in summed and (3, 7) not in summed


def gradient_of(layer):
    """The gradient of a layer's kernel, as a function of both arguments."""

    def loss(kernel, x):
        return jnp.sum(jnp.tanh(layer(x, kernel)))

    return jax.grad(loss)


def einsum(equation):
    return gradient_of(lambda x, kernel: jnp.einsum(equation, x, kernel))


def of_bfloat16(x, kernel, result=None):
    x, kernel = (each.astype("bfloat16") for each in (x, kernel))
    return lax.dot(x, kernel, preferred_element_type=result)


def transposed(use=lambda product: product.mT, **options):
    """A transposed product as a function of its operands, and their shapes."""

    def call(left, right):
        return use(lax.dot(left, right, **options))

    return call, (30, 50), (50, 70)


def scan(block):
    def layer(x, kernels):
        return lax.scan(lambda x, k: (block(x, k), None), x, kernels)[0]

    return layer


def square(x, kernel):
    return jnp.tanh(x @ kernel)


ALGORITHM = lax.DotAlgorithm(*[np.float32] * 3, 1, 1, 1, False)
KERNEL, INPUTS = (50, 70), (30, 50)
# Functions, shapes of their arguments, transpositions without and with the
# exchange.
PRODUCTS = {
    "matrix": (gradient_of(jnp.matmul), KERNEL, INPUTS, 1, 0),
    "rows of rows": (gradient_of(jnp.matmul), KERNEL, (3, 9, 50), 1, 0),
    "batch": (gradient_of(jnp.matmul), (2, 50, 70), (2, 30, 50), 1, 0),
    "heads": (einsum("abc,cde->abde"), (50, 4, 16), (3, 9, 50), 1, 0),
    "joined": (einsum("abcd,cde->abe"), (4, 16, 50), (3, 9, 4, 16), 1, 0),
    "transposed": (gradient_of(lambda x, k: x @ k.T), (70, 50), INPUTS, 3, 1),
    "scan": (gradient_of(scan(square)), (3, 40, 40), (30, 40), 1, 0),
    "scan, again": (
        *(gradient_of(scan(jax.checkpoint(square))), (3, 40, 40), (30, 40)),
        *(1, 0),
    ),
    "branches": (
        gradient_of(lambda x, k: lax.cond(x[0, 0] > 0, square, jnp.dot, x, k)),
        *(KERNEL, INPUTS, 2, 0),
    ),
    "float32 of bfloat16": (
        gradient_of(lambda x, k: of_bfloat16(x, k, "float32")),
        *(KERNEL, INPUTS, 1, 0),
    ),
    "precision of each": (
        *transposed(precision=("highest", "default")),
        *(1, 0),
    ),
    # Left alone:
    "used twice": (*transposed(use=lambda p: (p.T, p + 1)), 1, 1),
    "returned": (*transposed(use=lambda p: (p.T, p)), 1, 1),
    "other axes": (
        lambda a, b: jnp.einsum("abc,cd->abd", a, b).transpose((1, 0, 2)),
        *((2, 3, 5), (5, 7), 1, 1),
    ),
    "bfloat16": (gradient_of(of_bfloat16), KERNEL, INPUTS, 1, 1),
}


def count(program, name):
    """How many equations of that name a program has, inside of others too."""
    return sum(
        (equation.primitive.name == name)
        + sum(count(each, name) for each in inner(equation))
        for equation in program.eqns
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_numbers_of_one_device(name):
    """Which exchanges operands itself; on some CPUs the bits are equal, too."""
    fn, *shapes, before, after = PRODUCTS[name]
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=s), "float32") for s in shapes]
    program = jax.make_jaxpr(fn)(*arrays)
    changed = untransposed(program)
    assert count(program.jaxpr, "transpose") == before
    assert count(changed.jaxpr, "transpose") == after
    products = count(program.jaxpr, "dot_general")
    assert count(changed.jaxpr, "dot_general") == products
    expected, found = (
        jax.jit(jaxpr_as_fun(each))(*arrays) for each in (program, changed)
    )
    for own, theirs in zip(found, expected, strict=True):
        assert own.dtype == theirs.dtype
        own, theirs = (np.asarray(each, "float32") for each in (own, theirs))
        np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=1e-5)


def test_an_algorithm_may_tell_operands_apart():
    fn, *shapes = transposed(precision=ALGORITHM)
    program = jax.make_jaxpr(fn)(*map(np.ones, shapes))
    assert str(untransposed(program)) == str(program)


def test_it_is_needed_still():
    """JAX sums the gradient before it transposes it, in a program of its own.

    See the report, `late_transposition.py`.
    """
    shape = late_transposition.INPUTS, late_transposition.OUTPUTS
    late, early = (
        late_transposition.sums_of(late_transposition.compiled(own).as_text())
        for own in (False, True)
    )
    assert early == [shape]
    assert late != [shape], (
        "JAX now sums the gradient in its variable's shape by itself. Delete "
        "`keras_dist_jax/products.py`, `Layout.edits`, this test and the "
        "report beside it."
    )


def test_what_no_edit_changes_stays_the_same_program():
    layer = jax.jit(lambda x, kernel: jnp.tanh(x @ kernel))

    def step(x, kernel):
        loss = jax.value_and_grad(lambda k: layer(layer(x, k), k).sum())
        return loss(kernel)

    square = np.ones((3, 3), "float32")
    program = jax.make_jaxpr(step)(square, square)
    assert rewritten(program) is program
    changed = untransposed(program)
    assert changed is not program
    # Two calls of one program are still calls of one.
    assert len({*map(id, inside(changed))}) == len({*map(id, inside(program))})


def inside(program):
    return [
        each for equation in opened(program).eqns for each in inner(equation)
    ]
