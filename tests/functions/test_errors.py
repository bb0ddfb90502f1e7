"""What can't be compiled is refused, and leaves nothing broken."""

import gc
import weakref

import keras
import numpy as np
import pytest

import keras_dist
from functions.helpers import TRACES
from functions.helpers import Unhashable
from functions.helpers import array
from functions.helpers import cut
from functions.helpers import ids
from functions.helpers import numbers
from functions.helpers import strategy_of
from keras_dist.errors import TraceError

ops = keras.ops
some_replicas = pytest.mark.parametrize("num_replicas", [1, 2])


@some_replicas
def test_an_exception_leaves_variables_usable(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(0.0, aggregation="mean")
        metric = keras.metrics.Sum()

    @keras_dist.function
    def step(x, fails):
        v.assign_add(x)
        metric.update_state(x)
        if fails:
            raise KeyError("as told")
        return v + 0.0

    total = sum(range(num_replicas))
    x = ids(strategy)
    with pytest.raises(KeyError, match="as told"):
        strategy.run(step, (x, True))
    before = float(array(v))  # where it runs uncompiled, it ran up to there
    strategy.run(step, (x, False))
    with pytest.raises(KeyError, match="as told"):
        strategy.run(step, (x, True))
    v.assign(before)
    metric.reset_state()
    strategy.run(step, (x, False))
    assert float(array(v)) == before + total / num_replicas
    assert float(array(metric.result())) == total


@some_replicas
def test_a_variable_made_in_a_later_call_is_refused(num_replicas):
    strategy = strategy_of(num_replicas)
    made = []

    @keras_dist.function
    def step(x):
        made.append(keras.Variable(2.0))
        return x * made[-1]

    # Where it is traced twice to begin with, it shows in the first call.
    with pytest.raises(TraceError, match="(?s)'step'.*outside"):
        for rows in (1, 2):
            x = np.ones(rows * num_replicas, "float32")
            strategy.run(step, (cut(x, num_replicas),))


def test_a_variable_made_in_a_later_call_without_a_strategy_is_refused():
    kept = {}

    @keras_dist.function
    def step(x, name):
        if name not in kept:
            kept[name] = keras.Variable(1.0)
        kept[name].assign_add(x)
        return kept[name] + 0.0

    x = np.float32(1.0)
    assert [float(array(step(x, "a"))) for _ in range(2)] == [2.0, 3.0]
    with pytest.raises(TraceError, match="first"):
        step(x, "b")
    assert float(array(step(x, "a"))) == 4.0


@pytest.mark.parametrize("options", [{1}, Unhashable(), bytearray(2)])
def test_a_static_argument_without_a_hash_is_refused_by_name(options):
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x, how, *, why=None):
        return x

    x = ids(strategy)
    for args, kwargs, name in (
        ((x, options), {}, "how"),
        ((x, [1, options]), {}, "how"),
        ((x, 1), {"why": {"a": options}}, "why"),
    ):
        with pytest.raises(TypeError, match=f"(?s)`{name}`.*'step'"):
            strategy.run(step, args, kwargs)
    with pytest.raises(TypeError, match="`how`"):
        step(np.ones(2), options)
    assert numbers(strategy.run(step, (x, "a"))) == [0.0, 1.0]


@some_replicas
def test_run_in_run_is_refused(num_replicas):
    strategy = strategy_of(num_replicas)
    inner = keras_dist.function(lambda: 1)
    outer = keras_dist.function(lambda: strategy.run(inner))
    for fn in (outer, lambda: strategy.run(inner)):
        with pytest.raises(RuntimeError, match="cross-replica context"):
            strategy.run(fn)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_copies_that_would_differ_are_refused(dtype):
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(5, dtype=dtype, trainable=dtype == "float32")
    step = keras_dist.function(lambda x: v.assign(ops.cast(x, dtype)))
    with pytest.raises(keras_dist.ReplicaDivergenceError):
        strategy.run(step, (ids(strategy),))
    equal = (keras_dist.PerReplica([7.0, 7.0]),)
    if keras.backend.backend() == "jax":
        # What is compiled is one program, before there are any values.
        with pytest.raises(keras_dist.ReplicaDivergenceError):
            strategy.run(step, equal)
        return
    strategy.run(step, equal)
    assert [float(array(c)) for c in v.values] == [7.0, 7.0]


def test_replicas_that_meet_at_different_points_are_refused():
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        context = keras_dist.get_replica_context()
        if isinstance(context.replica_id_in_sync_group, int):
            if context.replica_id_in_sync_group == 0:
                return x
        else:  # no Python can tell replicas apart there
            raise keras_dist.ReplicaDivergenceError("traced")
        return context.all_reduce("SUM", x)

    with pytest.raises(keras_dist.ReplicaDivergenceError):
        strategy.run(step, (ids(strategy),))


def test_python_control_flow_on_tensors_says_what_to_do():
    @keras_dist.function
    def step(x):
        return x if x > 0 else -x

    if not TRACES:
        assert float(array(step(np.float32(-2.0)))) == 2.0
        return
    with pytest.raises(TypeError, match=r"ops\.cond"):
        step(np.float32(-2.0))


def test_arguments_that_do_not_fit():
    strategy = strategy_of(2)
    step = keras_dist.function(lambda x: x)
    with pytest.raises(ValueError, match="list or tuple"):
        strategy.run(step, args=ops.ones(2))
    values = keras_dist.PerReplica([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="component for each replica"):
        strategy.run(step, (values,))


def test_what_is_no_function_is_refused():
    class Slots:
        __slots__ = ()

        @keras_dist.function
        def method(self):
            """Never runs."""

    with pytest.raises(TypeError, match="callable"):
        keras_dist.function(3)
    with pytest.raises(TypeError, match="__weakref__"):
        Slots().method()


def test_what_was_compiled_for_an_object_goes_with_it():
    class Owner:
        def __init__(self):
            self.v = keras.Variable(1.0)

        @keras_dist.function
        def double(self, x):
            """Twice the product."""
            return 2 * x * self.v

    owner = Owner()
    assert float(array(owner.double(np.float32(2.0)))) == 4.0
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
