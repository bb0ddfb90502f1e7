"""Which results of a program may differ between replicas."""

import types

import jax
import jax.experimental
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import keras_dist
from keras_dist_jax.programs.jaxprs import AXIS
from keras_dist_jax.programs.jaxprs import differing
from keras_dist_jax.programs.jaxprs import has_callbacks


def found(fn, arguments=(True, False)):
    """Of `fn(own, shared)`: what its results may do."""
    program = jax.make_jaxpr(fn, axis_env=[(AXIS, 2)])(1.0, 2.0)
    return differing(program, arguments)[0]


CASES = {
    "shared": (lambda own, shared: shared * 2, False),
    "own": (lambda own, shared: shared + own, True),
    "constant": (lambda own, shared: jnp.zeros(3), False),
    "summed": (lambda own, shared: lax.psum(own, AXIS) + shared, False),
    "mean": (lambda own, shared: lax.pmean(own, AXIS), False),
    "largest": (lambda own, shared: lax.pmax(own, AXIS), False),
    "gathered": (lambda own, shared: lax.all_gather(own, AXIS), False),
    "own again": (lambda own, shared: lax.psum(own, AXIS) * own, True),
    "index": (lambda own, shared: shared + lax.axis_index(AXIS), True),
    "in a function": (lambda own, shared: jax.jit(jnp.sin)(own), True),
    "shared in a function": (
        lambda own, shared: jax.jit(jnp.sin)(shared),
        False,
    ),
    "index in a function": (
        lambda own, shared: jax.jit(lambda x: x + lax.axis_index(AXIS))(shared),
        True,
    ),
    "summed in a function": (
        lambda own, shared: jax.jit(lambda x: lax.psum(x, AXIS))(own),
        False,
    ),
    "a branch by own": (
        lambda own, shared: lax.cond(own > 0, lambda: 1.0, lambda: 2.0),
        True,
    ),
    "a branch by shared": (
        lambda own, shared: lax.cond(shared > 0, lambda: 1.0, lambda: 2.0),
        False,
    ),
    "a branch with own": (
        lambda own, shared: lax.cond(shared > 0, lambda: own, lambda: 2.0),
        True,
    ),
    "carried": (
        lambda own, shared: lax.scan(
            lambda c, _: (c * own, None), shared, None, length=2
        )[0],
        True,
    ),
    "carried by way of another": (
        lambda own, shared: lax.scan(
            lambda c, _: ((c[1], c[2], c[2]), None),
            (shared, shared, own),
            None,
            length=2,
        )[0][0],
        True,
    ),
    "carried shared": (
        lambda own, shared: lax.scan(
            lambda c, _: ((c[0] * 2, c[1] * own), None),
            (shared, shared),
            None,
            length=2,
        )[0][0],
        False,
    ),
    "scanned": (
        lambda own, shared: lax.scan(
            lambda c, x: (c, x + own), shared, jnp.zeros(3)
        )[1],
        True,
    ),
    "as often as own": (
        lambda own, shared: lax.while_loop(
            lambda c: c < own, lambda c: c + 1, shared
        ),
        True,
    ),
    "as often as shared": (
        lambda own, shared: lax.while_loop(
            lambda c: c < 5, lambda c: c + 1, shared
        ),
        False,
    ),
    "remembered": (
        lambda own, shared: jax.checkpoint(lambda x: x * shared)(own),
        True,
    ),
    "a derivative": (
        lambda own, shared: jax.grad(lambda w: w * own)(shared),
        True,
    ),
    "carried by no step": (
        lambda own, shared: lax.scan(
            lambda c, _: (jnp.zeros_like(c), None), own, None, length=0
        )[0],
        True,
    ),
    "carried shared by no step": (
        lambda own, shared: lax.scan(
            lambda c, _: (c * own, None), shared, None, length=0
        )[0],
        False,
    ),
    "a custom derivative of shared": (
        lambda own, shared: jax.nn.relu(shared),
        False,
    ),
}


# Of an array that is the same on each replica, and others.
COLLECTIVES = {
    "scattered": (
        lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True),
        True,
    ),
    "exchanged": (
        lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        True,
    ),
    "passed on": (lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]), True),
    "passed to one": (lambda x: lax.ppermute(x, AXIS, [(0, 1)]), True),
    "summed by each": (
        lambda x: lax.psum(x, AXIS, axis_index_groups=[[0], [1]]),
        True,
    ),
    "gathered by each": (
        lambda x: lax.all_gather(x, AXIS, axis_index_groups=[[0], [1]]),
        True,
    ),
    "summed by all": (
        lambda x: lax.psum(x, AXIS, axis_index_groups=[[0, 1]]),
        False,
    ),
    "sent by one": (lambda x: lax.pbroadcast(x, (AXIS,), 0), False),
    "scattered in a function": (
        lambda x: jax.jit(
            lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)
        )(x),
        True,
    ),
    "scattered in a loop": (
        lambda x: lax.fori_loop(
            0, 2, lambda i, x: x + lax.ppermute(x, AXIS, [(0, 1)]), x
        ),
        True,
    ),
    "scattered and gathered": (
        lambda x: lax.all_gather(
            lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True),
            AXIS,
            tiled=True,
        ),
        False,
    ),
    "asked of Python": (
        lambda x: jax.experimental.io_callback(lambda x: x, x, x),
        True,
    ),
    "drawn by the device": (
        lambda x: lax.rng_uniform(x[0], x[1], (2,)),
        True,
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_rendezvous_give_each_replica_its_own_or_all_the_same(name):
    fn, expected = COLLECTIVES[name]
    x = jnp.arange(4.0)
    program = jax.make_jaxpr(fn, axis_env=[(AXIS, 2)])(x)
    assert differing(program, (False,))[0] == [expected]


class Atom:
    """A variable of a program, of no type."""

    aval = None


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("pbroadcast_dynamic", {"axis_name": (AXIS,)}),
        ("unreduced_pmax", {"axes": (AXIS,)}),
        ("unreduced_pmin", {"axes": (AXIS,)}),
        ("unreduced_psum", {"axes": (AXIS,)}),
    ],
)
def test_rendezvous_that_only_newer_versions_have(name, params):
    taken, given = Atom(), Atom()
    equation = types.SimpleNamespace(
        primitive=types.SimpleNamespace(name=name),
        params=params,
        invars=[taken],
        outvars=[given],
    )
    program = types.SimpleNamespace(
        invars=[taken], outvars=[given], eqns=[equation]
    )
    assert differing(program, (True,))[0] == [False]


@pytest.mark.parametrize("collective", ["scatter", "permute", "groups"])
def test_copies_of_a_variable_stay_equal(collective):
    """Not [0, 2] on one device and [4, 6] on the other."""

    def own(x):
        if collective == "scatter":
            return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)
        if collective == "permute":
            return lax.ppermute(x, AXIS, [(0, 1)])[2:]
        return lax.psum(
            x * lax.axis_index(AXIS), AXIS, axis_index_groups=[[0], [1]]
        )[2:]

    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        mean = keras.Variable(np.zeros(2, "float32"), trainable=False)
        weight = keras.Variable(np.zeros(2, "float32"))
    strategy.run(keras_dist.function(lambda: mean.assign(own(jnp.arange(4.0)))))
    copies = [np.asarray(component.value) for component in mean.values]
    expected = {"scatter": [2.0, 4.0]}.get(collective, [1.0, 1.5])
    np.testing.assert_array_equal(copies, [expected, expected])
    step = keras_dist.function(lambda: weight.assign(own(jnp.arange(4.0))))
    with pytest.raises(keras_dist.ReplicaDivergenceError, match="variable"):
        strategy.run(step)


@pytest.mark.parametrize("name", CASES)
def test_it_follows_what_is_of_each_replica(name):
    fn, expected = CASES[name]
    assert found(fn) == [expected]


WRITES = {
    "own": (lambda ref, own, shared: ref.set(own), True),
    "shared": (lambda ref, own, shared: ref.set(shared), False),
    "added": (lambda ref, own, shared: ref.add(own), True),
    "own, then shared": (
        lambda ref, own, shared: (ref.set(own), ref.set(shared)),
        False,
    ),
    "own, then a part": (
        lambda ref, own, shared: (ref.set(own), ref.set_first(shared)),
        True,
    ),
    "what it had": (
        lambda ref, own, shared: (ref.set(own), ref.set(ref.get() + shared)),
        True,
    ),
    "in a function": (
        lambda ref, own, shared: jax.jit(lambda: ref.set(own))(),
        True,
    ),
    "overwritten in a function": (
        lambda ref, own, shared: (
            ref.set(own),
            jax.jit(lambda: ref.set(shared))(),
        ),
        False,
    ),
    "in a branch by own": (
        lambda ref, own, shared: lax.cond(
            own > 0, lambda: ref.set(shared), lambda: None
        ),
        True,
    ),
    "read in a branch by own": (
        lambda ref, own, shared: lax.cond(
            own > 0, lambda: ref.get(), lambda: ref.get() * 2
        ),
        False,
    ),
    "in a branch by shared": (
        lambda ref, own, shared: lax.cond(
            shared > 0, lambda: ref.set(shared), lambda: None
        ),
        False,
    ),
    "own in a branch by shared": (
        lambda ref, own, shared: lax.cond(
            shared > 0, lambda: ref.set(own), lambda: None
        ),
        True,
    ),
    "in a loop": (
        lambda ref, own, shared: lax.fori_loop(
            0, 3, lambda i, x: (ref.set(x), x + own)[1], shared
        ),
        True,
    ),
    "shared in a loop": (
        lambda ref, own, shared: lax.fori_loop(
            0, 3, lambda i, x: (ref.set(x), x + 1)[1], shared
        ),
        False,
    ),
    "as often as own": (
        lambda ref, own, shared: lax.while_loop(
            lambda x: x < own, lambda x: (ref.set(x), x + 1)[1], shared
        ),
        True,
    ),
    "in a checkpoint": (
        lambda ref, own, shared: jax.checkpoint(lambda: ref.set(own))(),
        True,
    ),
}


class Ref:
    """A mutable array, as a function may close over it."""

    def __init__(self):
        self.array = jax.new_ref(jnp.zeros(2), kind="no_grad_no_remat")

    def get(self):
        return self.array[...]

    def set(self, value):
        self.array[...] = jnp.broadcast_to(value, (2,))

    def set_first(self, value):
        self.array[0] = value

    def add(self, value):
        jax.ref.addupdate(self.array, ..., jnp.broadcast_to(value, (2,)))


@pytest.mark.parametrize("name", WRITES)
def test_it_follows_what_is_written_to_mutable_arrays(name):
    fn, expected = WRITES[name]
    ref = Ref()

    def body(own, shared):
        fn(ref, own, shared)
        return ()

    program = jax.make_jaxpr(body, axis_env=[(AXIS, 2)])(1.0, 2.0)
    (place,) = (i for i, each in enumerate(program.consts) if each is ref.array)
    constants = [False] * len(program.consts)
    _, after = differing(program, (True, False), constants)
    assert after[2 + place] == expected


def test_nothing_differs_without_something_that_does():
    assert found(lambda own, shared: own + shared, (False, False)) == [False]


def test_callbacks_are_found_wherever_they_are():
    def show(x):
        jax.debug.callback(lambda value: None, x)
        return x

    assert has_callbacks(jax.make_jaxpr(show)(1.0))
    assert has_callbacks(jax.make_jaxpr(jax.jit(show))(1.0))
    inside = jax.make_jaxpr(
        lambda x: lax.cond(x > 0, lambda: show(x), lambda: x)
    )(1.0)
    assert has_callbacks(inside)
    assert not has_callbacks(jax.make_jaxpr(jnp.sin)(1.0))
