"""Replicas' copies of a variable stay equal, whatever a function computes.

The results of a program that may differ between replicas are known.
"""

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


def results(own, shared):
    """What differs between replicas if `own` does, and what doesn't."""

    def scan(fn, carry, length=2):
        return lax.scan(lambda c, _: (fn(c), None), carry, None, length)[0]

    def scatter(x):
        return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)

    x = jnp.arange(4.0) * shared
    each, both = [[0], [1]], [[0, 1]]
    differ = {
        "own": shared + own,
        "own again": lax.psum(own, AXIS) * own,
        "index": shared + lax.axis_index(AXIS),
        "in a function": jax.jit(jnp.sin)(own),
        "index in a function": jax.jit(lambda x: x + lax.axis_index(AXIS))(
            shared
        ),
        "a branch by own": lax.cond(own > 0, lambda: 1.0, lambda: 2.0),
        "a branch with own": lax.cond(shared > 0, lambda: own, lambda: 2.0),
        "carried": scan(lambda c: c * own, shared),
        "carried by way of another": scan(
            lambda c: (c[1], c[2], c[2]), (shared, shared, own)
        )[0],
        "carried by no step": scan(jnp.zeros_like, own, 0),
        "scanned": lax.scan(lambda c, x: (c, x + own), shared, x)[1],
        "often": lax.while_loop(lambda c: c < own, lambda c: c + 1, shared),
        "remembered": jax.checkpoint(lambda x: x * shared)(own),
        "a derivative": jax.grad(lambda w: w * own)(shared),
        "scattered": scatter(x),
        "scattered in a function": jax.jit(scatter)(x),
        "exchanged": lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        "passed on": lax.ppermute(x, AXIS, [(0, 1), (1, 0)]),
        "passed to one": lax.ppermute(x, AXIS, [(0, 1)]),
        "summed by each": lax.psum(x, AXIS, axis_index_groups=each),
        "gathered by each": lax.all_gather(x, AXIS, axis_index_groups=each),
        "passed in a loop": scan(
            lambda x: x + lax.ppermute(x, AXIS, [(0, 1)]), x
        ),
        "asked of Python": jax.experimental.io_callback(lambda x: x, x, x),
        "drawn by the device": lax.rng_uniform(x[0], x[1], (2,)),
    }
    same = {
        "shared": shared * 2,
        "constant": jnp.zeros(3),
        "summed": lax.psum(own, AXIS) + shared,
        "mean": lax.pmean(own, AXIS),
        "largest": lax.pmax(own, AXIS),
        "gathered": lax.all_gather(own, AXIS),
        "in a function": jax.jit(jnp.sin)(shared),
        "summed in a function": jax.jit(lambda x: lax.psum(x, AXIS))(own),
        "a branch": lax.cond(shared > 0, lambda: 1.0, lambda: 2.0),
        "carried": scan(lambda c: (c[0] * 2, c[1] * own), (shared, shared))[0],
        "carried by no step": scan(lambda c: c * own, shared, 0),
        "often": lax.while_loop(lambda c: c < 5, lambda c: c + 1, shared),
        "a custom derivative": jax.nn.relu(shared),
        "summed by all": lax.psum(x, AXIS, axis_index_groups=both),
        "sent by one": lax.pbroadcast(x, (AXIS,), 0),
        "scattered and gathered": lax.all_gather(scatter(x), AXIS, tiled=True),
    }
    return differ, same


def test_it_follows_what_is_of_each_replica():
    program, shapes = jax.make_jaxpr(
        results, axis_env=[(AXIS, 2)], return_shape=True
    )(1.0, 2.0)
    flags, _ = differing(program, (True, False))
    found = jax.tree.unflatten(jax.tree.structure(shapes), flags)
    expected = tuple(
        dict.fromkeys(names, differs)
        for names, differs in zip(shapes, (True, False), strict=True)
    )
    assert found == expected
    program = jax.make_jaxpr(jnp.add)(1.0, 2.0)
    assert differing(program, (False, False))[0] == [False]


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


# Functions of a mutable array, and of a value of each replica's and one that
# all share: those that leave different values there, and others.
OWN = {
    "own": lambda ref, own, shared: ref.set(own),
    "added": lambda ref, own, shared: ref.add(own),
    "a part": lambda ref, own, shared: (ref.set(own), ref.set_first(shared)),
    "what it had": lambda ref, own, shared: (
        ref.set(own),
        ref.set(ref.get() + shared),
    ),
    "in a function": lambda ref, own, shared: jax.jit(lambda: ref.set(own))(),
    "in a branch by own": lambda ref, own, shared: lax.cond(
        own > 0, lambda: ref.set(shared), lambda: None
    ),
    "own in a branch": lambda ref, own, shared: lax.cond(
        shared > 0, lambda: ref.set(own), lambda: None
    ),
    "in a loop": lambda ref, own, shared: lax.fori_loop(
        0, 3, lambda i, x: (ref.set(x), x + own)[1], shared
    ),
    "as often as own": lambda ref, own, shared: lax.while_loop(
        lambda x: x < own, lambda x: (ref.set(x), x + 1)[1], shared
    ),
    "in a checkpoint": lambda ref, own, shared: jax.checkpoint(
        lambda: ref.set(own)
    )(),
}
SHARED = {
    "shared": lambda ref, own, shared: ref.set(shared),
    "overwritten": lambda ref, own, shared: (ref.set(own), ref.set(shared)),
    "overwritten in a function": lambda ref, own, shared: (
        ref.set(own),
        jax.jit(lambda: ref.set(shared))(),
    ),
    "read in a branch by own": lambda ref, own, shared: lax.cond(
        own > 0, lambda: ref.get(), lambda: ref.get() * 2
    ),
    "in a branch by shared": lambda ref, own, shared: lax.cond(
        shared > 0, lambda: ref.set(shared), lambda: None
    ),
    "shared in a loop": lambda ref, own, shared: lax.fori_loop(
        0, 3, lambda i, x: (ref.set(x), x + 1)[1], shared
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


@pytest.mark.parametrize("write", [*OWN.values(), *SHARED.values()])
def test_it_follows_what_is_written_to_mutable_arrays(write):
    ref = Ref()

    def body(own, shared):
        write(ref, own, shared)
        return ()

    program = jax.make_jaxpr(body, axis_env=[(AXIS, 2)])(1.0, 2.0)
    (place,) = (i for i, each in enumerate(program.consts) if each is ref.array)
    constants = [False] * len(program.consts)
    _, after = differing(program, (True, False), constants)
    assert after[2 + place] == (write in OWN.values())


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
