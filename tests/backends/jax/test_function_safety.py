"""Compiled functions lose nothing, mix up nothing, and get nothing wrong."""

import contextlib
import functools
import gc
import linecache
import signal
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from functions.helpers import array
from functions.helpers import numbers
from keras_dist_jax.variables.bindings import LOCK
from nothing_lost.in_threads import in_threads
from parity import harness
from parity.harness import strategy as strategy_of

ONES = keras_dist.PerReplica([np.ones(2, "float32")] * 2)


def uneven(rows=(3, 1)):
    return keras_dist.PerReplica([np.ones((n, 2), "float32") for n in rows])


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("place", ["keep", "_keep", "combine"])
def test_an_interrupt_may_come_anywhere(place):
    """Between any two instructions that put a result where it belongs."""
    strategy = strategy_of(2)
    with strategy.scope():
        v, mean = keras.Variable(0.0), keras.metrics.Mean()

    @keras_dist.function
    def step():
        mean.update_state([2.0])
        v.assign_add(1.0)

    strategy.run(step)
    assert float(mean.result()) == 2.0

    def enters_or_leaves(frame):
        """Whether it is at the edge of a block, where Python never stops."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return line.lstrip().startswith(("with ", "try:"))

    def interrupt_after(count):
        def trace(frame, event, _):
            nonlocal count
            frame.f_trace_opcodes = True
            count -= event == "opcode" and not enters_or_leaves(frame)
            if count < 0:
                sys.settrace(None)
                raise Interrupted
            return trace

        def start(frame, event, argument):
            code = frame.f_code
            is_there = code.co_name == place and "_jax" in code.co_filename
            return trace(frame, event, argument) if is_there else None

        # Python 3.12 looks at it when tracing starts.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(start)

    stops = 0
    before = sys.gettrace()
    while True:
        expected = float(v)
        interrupt_after(stops)
        try:
            strategy.run(step)
            float(mean.result())
        except Interrupted:
            stops += 1
        else:
            break
        finally:
            sys.settrace(before)
        assert float(v) in (expected, expected + 1.0)
        assert float(mean.result()) == 2.0
        assert float(mean.count) == 2 * float(v)
    assert stops > 10
    # A lock that an interrupt leaves held stops the other threads for ever.
    assert not LOCK._is_owned()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_interrupt_loses_no_variable(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(np.zeros(1000, "float32"))
        mean = keras.metrics.Mean()

    @keras_dist.function
    def step(x):
        mean.update_state(x)
        v.assign(v + 1.0)
        return ops.sum(x), "text", {"x": x}

    x = strategy.experimental_distribute_values_from_function(
        lambda context: ops.ones((3,))
    )
    strategy.run(step, (x,))

    def stop(*_):
        raise Interrupted

    def run_until_stopped(seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for _ in range(200):
            strategy.run(step, (x,))
        signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, stop)
    rng = np.random.default_rng(0)
    stops = 0
    # What is raised while it collects garbage goes nowhere.
    gc.collect()
    gc.disable()
    try:
        for _ in range(60):
            try:
                run_until_stopped(rng.uniform(2e-4, 3e-3))
            except Interrupted:
                stops += 1
            numbers = array(v)
            assert (numbers == numbers[0]).all()
            assert float(mean.result()) == 1.0
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert stops > 10


def test_threads_get_their_own_results():
    double = keras_dist.function(lambda x: 2 * x)
    layer = keras.layers.Dropout(0.5, seed=1)
    layer.build((4,))
    drop = keras_dist.function(lambda x: layer(x, training=True))

    def call(number):
        for _ in range(200):
            x = np.full(4, float(number), "float32")
            assert (array(double(x)) == 2 * number).all()
            drop(x)

    in_threads(*(functools.partial(call, number) for number in range(1, 5)))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_error_of_a_callback_is_raised_once(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(0.0)

    def on_host(x):
        if float(v) < 1.0:
            raise ValueError("too early")
        return x

    @keras_dist.function
    def step(x):
        v.assign_add(1.0)
        shape = jax.ShapeDtypeStruct((), "float32")
        return jax.pure_callback(on_host, shape, x)

    with pytest.raises(Exception, match="too early"):
        strategy.run(step, (np.float32(2.0),))
    assert float(v) == 0.0
    v.assign(1.0)
    result = strategy.run(step, (np.float32(2.0),))
    assert numbers(result) == [2.0] * num_replicas
    assert float(v) == 2.0
    jax.effects_barrier()


def test_a_metric_is_combined_wherever_it_is_read_first():
    strategy = strategy_of(2)
    with strategy.scope():
        mean = keras.metrics.Mean()
        v = keras.Variable(1.0)
    step = keras_dist.function(lambda x: mean.update_state(3 * x))
    strategy.run(step, (ONES,))
    grad = keras_dist.gradient(lambda: v * mean.result(), v)
    assert float(grad) == 3.0
    strategy.run(step, (ONES,))
    with keras.StatelessScope():
        assert float(mean.result()) == 3.0
    assert float(mean.result()) == 3.0
    strategy.run(step, (ONES,))
    jax.jit(lambda: mean.result())()
    assert float(mean.result()) == 3.0


@pytest.mark.parametrize("rows", [(3, 2), (1, 0), (2, 1)])
def test_random_layers_with_different_numbers_of_rows(rows):
    strategy = strategy_of(2)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=3)
    step = keras_dist.function(lambda x: ops.sum(layer(x, training=True)))
    for _ in range(2):
        strategy.run(step, (uneven(rows),))
    states = [array(c.value) for c in layer.seed_generator.state.values]
    np.testing.assert_array_equal(states[0], states[1])
    assert states[0][1] == 2


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_keras_own_seeds(num_replicas):
    strategy = strategy_of(num_replicas)
    draw = keras_dist.function(lambda: keras.random.uniform((3,)))
    drawn = [numbers(strategy.run(draw)) for _ in range(2)]
    assert len(np.unique(drawn)) == 6 * num_replicas


def test_indexing_a_variable():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable([1.0, 2.0, 3.0])
    step = keras_dist.function(lambda: (v[0], v[:2], v.value[1]))
    found = [numbers(each) for each in strategy.run(step)]
    assert found == [[1.0, 1.0], [[1.0, 2.0]] * 2, [2.0, 2.0]]


def test_rendezvous_that_only_some_come_to_are_refused():
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        context = keras_dist.get_replica_context()
        return ops.cond(
            ops.sum(x) > 2,
            lambda: context.all_reduce("SUM", ops.sum(x)),
            lambda: ops.sum(x),
        )

    with pytest.raises(keras_dist.ReplicaDivergenceError, match="a branch"):
        strategy.run(step, (ONES,))


@pytest.mark.parametrize("by", ["all", "each"])
def test_updates_in_a_branch(by):
    """All replicas have to take it."""
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([v])

    @keras_dist.function
    def step(x):
        def update():
            optimizer.apply([ops.sum(x)], [v])
            return 0

        chosen = optimizer.iterations if by == "all" else x[0] - 1
        return ops.cond(ops.equal(chosen, 0), update, lambda: 0)

    if by == "each":
        with pytest.raises(
            keras_dist.ReplicaDivergenceError, match="a branch that only"
        ):
            strategy.run(step, (ONES,))
        assert float(v) == 1.0
        return
    for _ in range(2):
        strategy.run(step, (ONES,))
    assert float(v) == -3.0 and int(optimizer.iterations) == 1


def test_a_print_after_a_collective_with_different_numbers_of_rows(capfd):
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x):
        context = keras_dist.get_replica_context()
        total = context.all_reduce("SUM", ops.sum(x))
        keras_dist.print("own", ops.sum(x), "of", total)
        return total

    strategy.run(step, (uneven(),))
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [
        "replica 0: own 6.0 of 8.0",
        "replica 1: own 2.0 of 8.0",
    ]


def test_a_tensor_hidden_in_an_object_is_refused():
    class Box:
        def __init__(self, value):
            self.value = value

    step = keras_dist.function(Box)
    with pytest.raises(keras_dist.TraceError, match="Box"):
        step(np.ones(2, "float32"))


def test_zeros_of_both_signs_are_two_values():
    divide = keras_dist.function(lambda x, by: x / (x * by))
    x = np.ones((), "float32")
    assert float(divide(x, 0.0)) == np.inf
    assert float(divide(x, -0.0)) == -np.inf


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_array_on_another_device(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(1.0)
    x = jax.device_put(np.float32(2.0), jax.devices()[3])
    result = strategy.run(keras_dist.function(lambda x: v * x), (x,))
    assert numbers(result) == [2.0] * num_replicas


READS = {
    "in a replica": lambda s, v: s.run(lambda: v.value),
    "as an argument": lambda s, v: s.run(lambda x: x, (v.value,)),
    "of an argument": lambda s, v: s.run(lambda v: v.value, (v,)),
    "compiled": lambda s, v: s.run(keras_dist.function(lambda: v.value)),
    "merged": lambda s, v: s.run(
        lambda: keras_dist.get_replica_context().merge_call(lambda _: v.value)
    ),
    "of components": lambda s, v: [
        component.value for component in s.experimental_local_results(v)
    ],
    "updated": lambda s, v: s.extended.update(
        v, lambda component: component.value, group=False
    ),
    "broadcast": lambda s, v: s.extended.broadcast_to(
        v.value, [f"cpu:{i}" for i in range(s.num_replicas_in_sync)]
    ),
    "outside": lambda s, v: v.value,
}


def written_by_a_function(strategy):
    """A variable, and a callable that changes it."""
    with strategy.scope():
        v = keras.Variable(np.arange(4.0, dtype="float32"))
    step = keras_dist.function(lambda: v.assign(v + 1.0))
    return v, lambda: strategy.run(step)


def written_by_fit(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    return model.layers[0].kernel, lambda: model.fit(x, x, verbose=0)


@pytest.mark.parametrize("make", [written_by_a_function, written_by_fit])
@pytest.mark.parametrize("read", READS)
def test_what_was_read_outlives_the_calls_that_write(read, make):
    for strategy in (strategy_of(1), strategy_of(2), harness.central(2)):
        v, write = make(strategy)
        write()
        write()
        found = READS[read](strategy, v)
        before = np.array(v.numpy())
        write()
        write()
        assert not np.array_equal(v.numpy(), before)
        for part in jax.tree.leaves(found):
            np.testing.assert_array_equal(part, before)


@pytest.mark.parametrize(
    "strategy", [strategy_of(1), strategy_of(2), harness.central(2)]
)
def test_arrays_of_the_users_outlive_training(strategy):
    """Those that they assigned, and those of a model that was adopted."""
    kernel, train = written_by_fit(strategy)
    mine = jnp.ones((2, 2))
    kernel.assign(mine)
    train()
    train()
    np.testing.assert_array_equal(mine, np.ones((2, 2)))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    read = model.layers[0].kernel.value
    before = np.array(read)
    x = np.ones((4, 2), "float32")
    strategy.distribute(model).fit(x, x, verbose=0)
    np.testing.assert_array_equal(read, before)


def test_branches_are_traced_once_however_deep():
    calls = []

    def nested(depth, x):
        if not depth:
            calls.append(x)
            return x + 1
        return ops.cond(
            ops.sum(x) > 0, lambda: nested(depth - 1, x * 2), lambda: x
        )

    step = keras_dist.function(lambda x: nested(6, x))
    assert array(step(np.ones(1, "float32"))).tolist() == [65.0]
    assert len(calls) == 1


def test_fit_and_a_function_do_not_wait_for_each_other():
    """A step that is traced reads a metric that a function has just written."""
    strategy = strategy_of(2)
    is_tracing, goes_on = threading.Event(), threading.Event()
    read = []  # no part of the model
    with strategy.scope():
        mean = keras.metrics.Mean()

        class Reads(keras.layers.Layer):
            def call(self, x):
                if isinstance(x, jax.core.Tracer) and read:
                    is_tracing.set()
                    goes_on.wait(5)
                    return x * (1 + 0 * read[0].total.value)
                return x

        model = keras.Sequential([keras.Input((2,)), Reads()])
        model.compile("sgd", "mse")

    step = keras_dist.function(lambda: mean.update_state([2.0]))
    x = np.ones((6, 2), "float32")
    model.fit(x[:4], x[:4], verbose=0)
    strategy.run(step)
    read.append(mean)

    def call():
        is_tracing.wait(60)
        threading.Timer(1, goes_on.set).start()
        strategy.run(step)

    in_threads(call, lambda: model.fit(x, x, verbose=0))
    assert float(mean.total) == 8.0


class Config:
    """An object without `==`."""


@pytest.mark.parametrize("nest", [list, tuple, lambda items: {"a": items}])
def test_objects_among_the_arguments_are_let_go(nest):
    strategy = strategy_of(2)

    @keras_dist.function
    def step(x, objects):
        leaves = jax.tree.leaves(objects)
        total = sum(float(each.factor) for each in leaves)
        return keras_dist.get_replica_context().all_reduce(
            "SUM", ops.sum(x * total)
        )

    def run(factor):
        made = Config()
        made.factor = factor
        for _ in range(2):
            found = strategy.run(step, (ONES, nest([made])))
            assert numbers(found) == [4 * factor] * 2
        return weakref.ref(made)

    assert run(2.0)() is None
    # It may have the address of the one before.
    assert run(3.0)() is None
    gc.collect()
    assert not programs_of(strategy)


def test_a_function_lets_its_strategy_go():
    def run():
        strategy = strategy_of(2)
        with strategy.scope():
            v = keras.Variable(1.0)
        step = keras_dist.function(
            lambda: keras_dist.get_replica_context().all_reduce("SUM", v * 2.0)
        )
        strategy.run(step)
        return weakref.ref(strategy), weakref.ref(v)

    found = run()
    gc.collect()
    assert [each() for each in found] == [None, None]


def test_many_programs_of_a_function_are_said_once(capfd):
    strategy = strategy_of(2)
    step = keras_dist.function(lambda number: number * 2)
    for number in range(8):
        strategy.run(step, (float(number),))
    assert len(programs_of(strategy)) == 8
    said = capfd.readouterr().err
    assert said.count("has been compiled 6 times") == 1


def programs_of(strategy):
    """The programs of the function that was called last."""
    return strategy.executor.compiler._last[1]


def test_a_function_that_jax_has_traced_in_another_one():
    strategy = strategy_of(2)
    with strategy.scope():
        v = keras.Variable(np.float32(2.0))

    @jax.jit
    def squares(x):
        return keras_dist.get_replica_context().all_reduce("SUM", x * x)

    @keras_dist.function
    def evaluate(x):
        return squares(v * ops.sum(x))

    @keras_dist.function
    def train(x):
        return keras_dist.value_and_grad(lambda: squares(v * ops.sum(x)), [v])

    x = keras_dist.PerReplica(np.float32([[1, 1], [2, 2]]))
    assert float(strategy.run(evaluate, (x,)).values[0]) == 80.0
    gc.collect()
    loss, (gradient,) = strategy.run(train, (x,))
    assert float(loss.values[0]) == 80.0
    # Of the sum over replicas, by each replica's own value.
    assert [float(each) for each in gradient.values] == [32.0, 128.0]


def normalized(way, strategy):
    """What a step with a layer in a transformation of JAX leaves."""
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        norm = keras.layers.BatchNormalization(momentum=0.5)
        drop = keras.layers.Dropout(0.5, seed=1)
        dense = keras.layers.Dense(4, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((4,)), dense, norm])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def forward(x):
        y = model(x, training=True)
        # Replicas draw for their own rows: only the seeds are compared.
        return y + 0.0 * drop(y, training=True)

    def loss(x):
        if way == "checkpoint":
            y = jax.checkpoint(lambda x: forward(x))(x)
        elif way == "scan":
            y = jax.lax.scan(lambda _, x: (0, forward(x)), 0, x[None])[1][0]
        elif way == "remat scope":
            with keras.RematScope(mode="full"):
                y = forward(x)
        else:
            y = forward(x)
        return ops.mean(ops.square(y - 1.0)) / (2 if strategy else 1)

    def step(x):
        value, grads = keras_dist.value_and_grad(
            lambda: loss(x), model.trainable_variables
        )
        optimizer.apply(grads, model.trainable_variables)
        return value

    compiled = keras_dist.function(step)
    # The same rows on each replica: they have the statistics of one device.
    batch = keras_dist.PerReplica([rows, rows])
    for _ in range(3):
        strategy.run(compiled, (batch,)) if strategy else step(
            jnp.asarray(rows)
        )
    return [*map(array, [*model.variables, drop.seed_generator.state])]


@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize("way", ["remat scope", "checkpoint", "scan"])
def test_layers_with_a_state_in_transformations_of_jax(way, variables):
    strategy = keras_dist.MirroredStrategy(
        ["cpu:0", "cpu:1"], variables=variables
    )
    expected = normalized(None, None)
    for ours, theirs in zip(normalized(way, strategy), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_jitted_functions_that_read_and_assign_variables():
    """JAX calls them once, and takes what it knows in other traces."""
    v, count = keras.Variable(2.0), keras.Variable(0.0, trainable=False)

    @jax.jit
    def jitted(x):
        count.assign_add(1.0)
        return x * v.value + count.value

    step = keras_dist.function(lambda x, _: jitted(x))
    found = [float(step(np.float32(1.0), static)) for static in "abab"]
    assert found == [3.0, 4.0, 5.0, 6.0] and float(count) == 4.0


@pytest.mark.parametrize("num_replicas", [0, 2])
def test_variables_in_functions_that_vmap_maps(num_replicas):
    strategy = strategy_of(num_replicas) if num_replicas else None
    x = np.arange(6.0, dtype="float32").reshape(3, 2)
    with strategy.scope() if strategy else contextlib.nullcontext():
        v = keras.Variable(2.0)
        count = keras.Variable(0.0, trainable=False)
        drop = keras.layers.Dropout(0.5, seed=1)
        drop.build((2,))
        seed = drop.seed_generator.state

    def counted(row):
        count.assign_add(1.0)
        return row * v.value

    def branch(row):
        return jax.lax.cond(row[0] > 1, lambda: row * v.value, lambda: row)

    def loop(row):
        return jax.lax.while_loop(
            lambda r: jnp.sum(r) < 9.0, lambda r: r + v.value, row
        )

    @keras_dist.function
    def step(x):
        return (
            ops.vectorized_map(counted, x),
            jax.vmap(branch)(x),
            jax.vmap(loop)(x),
            jax.vmap(jax.grad(lambda r: ops.sum(drop(r, training=True))))(x),
        )

    run = strategy.run if strategy else lambda fn, args: fn(*args)
    found = run(step, (jnp.asarray(x),))
    counts, branches, loops, kept = (
        array(each.values[0] if strategy else each) for each in found
    )
    np.testing.assert_array_equal(counts, x * 2)
    np.testing.assert_array_equal(branches, np.where(x[:, :1] > 1, x * 2, x))
    np.testing.assert_array_equal(loops, [[4, 5], [4, 5], [4, 5]])
    assert set(kept.ravel()) == {0.0, 2.0}
    assert float(count) == 1.0
    assert array(seed)[1] == 1


def test_a_custom_derivative_that_reads_a_variable_runs_uncompiled(capfd):
    limit = keras.Variable(1.0, trainable=False)

    @jax.custom_jvp
    def clip(x):
        return jnp.minimum(x, limit.value)

    clip.defjvp(lambda primals, tangents: (clip(*primals), tangents[0]))
    step = keras_dist.function(lambda x: jax.value_and_grad(clip)(x))
    for expected in (1.0, 5.0):
        limit.assign(expected)
        value, slope = step(np.float32(7.0))
        assert (float(value), float(slope)) == (expected, 1.0)
    # The rule of the derivative calls the function.
    assert capfd.readouterr().err.count("runs uncompiled") == 1
    plain = keras_dist.function(lambda x: clip(x))
    for expected in (1.0, 5.0):
        limit.assign(expected)
        assert float(plain(np.float32(7.0))) == expected
    assert capfd.readouterr().err.count("runs uncompiled") == 1


def test_a_function_that_jax_has_traced_elsewhere():
    """It keeps the programs of functions, with what was around them."""
    v = keras.Variable(2.0)

    @jax.jit
    def jitted(x):
        return x * v.value

    def body(x, _):
        return x * v.value, None

    step = keras_dist.function(lambda x: jitted(x))
    x = np.float32(3.0)
    assert float(step(x)) == float(jitted(x)) == 6.0

    @keras_dist.function
    def both(x, _):
        forward = jax.lax.scan(body, x, None, length=2)[0]
        slope = keras_dist.gradient(
            lambda: jax.lax.scan(body, x, None, length=2)[0], v
        )
        v.assign_add(1.0)
        return forward, slope, jax.lax.scan(body, x, None, length=2)[0]

    for static in "ab":
        value = float(v)
        found = [float(each) for each in both(x, static)]
        assert found == [3 * value**2, 6 * value, 3 * (value + 1) ** 2]


@pytest.mark.parametrize("where", ["mapped", "branch"])
def test_an_assignment_in_a_mapped_function_is_refused(where):
    v = keras.Variable(2.0)

    def assigned(row):
        v.assign(row)
        return row

    def mapped(row):
        if where == "mapped":
            return assigned(row)
        return jax.lax.cond(row > 0, assigned, lambda row: row, row)

    step = keras_dist.function(lambda x: jax.vmap(mapped)(x))
    with pytest.raises(keras_dist.errors.TraceError, match=r"`jax\.vmap` or"):
        step(np.arange(3.0, dtype="float32"))
    assert float(v) == 2.0


def test_another_array_in_the_memory_of_one_that_is_held():
    v = keras.Variable(np.zeros(4, "float32"))

    @keras_dist.function
    def add():
        v.assign_add(np.ones(4, "float32"))

    add()
    held = v.value
    alias = jax.device_put(held, jax.devices()[0])
    add()
    np.testing.assert_array_equal(alias, 1.0)
    np.testing.assert_array_equal(array(v), 2.0)
