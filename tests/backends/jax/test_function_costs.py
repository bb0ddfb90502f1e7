"""A compiled replica function costs one program, one all-reduce, few calls."""

import gc
import types

import jax
import keras
import numpy as np
import pytest

import keras_dist
import steps
from backends.jax.measures import compiled
from backends.jax.measures import count_all_reduces
from keras_dist_jax.placement import arrays
from parity import harness

ROWS = 16


def make_loop(num_replicas, layers=2, optimizer="adam"):
    strategy = harness.strategy(num_replicas)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                *[keras.layers.Dense(8) for _ in range(layers - 1)],
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.get(optimizer)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def losses_of(x, y):
        logits = model(x, training=True)
        accuracy.update_state(y, logits)
        return keras.losses.sparse_categorical_crossentropy(
            y, logits, from_logits=True
        )

    step = steps.train_step(model, optimizer, losses_of, global_batch_size=ROWS)
    train_step = keras_dist.function(step)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8)).astype("float32")
    y = rng.integers(0, 3, ROWS).astype("int32")
    dataset = strategy.experimental_distribute_dataset([(x, y)])
    (batch,) = dataset
    return strategy, model, optimizer, train_step, batch


@pytest.mark.parametrize(
    ("num_replicas", "layers", "optimizer"),
    [(1, 2, "adam"), (2, 2, "adam"), (2, 20, "adam"), (2, 5, "sgd")],
)
def test_one_all_reduce_however_many_variables(num_replicas, layers, optimizer):
    """And one replica meets nobody."""
    strategy, _, _, train_step, batch = make_loop(
        num_replicas, layers, optimizer
    )
    (program,) = compiled("step", lambda: strategy.run(train_step, args=batch))
    assert count_all_reduces(program) == num_replicas - 1


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_a_step_costs_fifteen_calls_at_most(num_replicas, calls_of):
    strategy, _, _, train_step, batch = make_loop(num_replicas)
    for _ in range(3):
        strategy.run(train_step, args=batch)
    calls = calls_of(lambda: strategy.run(train_step, args=batch))
    # A hand-written loop around a jitted step makes none.
    assert len(calls) <= 16, " ".join(calls)  # the lambda is one


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_nothing_is_traced_again(num_replicas):
    strategy, _, _, train_step, _ = make_loop(num_replicas)
    x = np.ones((10, 8), "float32")
    y = np.zeros((10,), "int32")
    batches = [(x[:8], y[:8]), (x[:6], y[:6]), (x[:2], y[:2])]
    traces = []
    original = train_step.python_function

    def counted(*args):
        traces.append(args[0].shape)
        return original(*args)

    train_step.python_function = counted
    for epoch in range(3):
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(train_step, args=batch)
        if epoch == 0:
            warm = len(traces)
    assert len(traces) == warm


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_leaves_the_state_and_its_outputs(num_replicas):
    strategy, model, optimizer, train_step, batch = make_loop(num_replicas)
    for _ in range(3):
        loss = strategy.run(train_step, args=batch)
    del loss
    gc.collect()
    before = {id(a) for a in jax.live_arrays()}
    size = sum(a.nbytes for a in jax.live_arrays())
    held = [v.value for v in (*model.variables, *optimizer.variables)]
    del held
    for _ in range(5):
        loss = strategy.run(train_step, args=batch)
    jax.block_until_ready([v.value for v in model.variables])
    del loss
    gc.collect()
    assert sum(a.nbytes for a in jax.live_arrays()) <= size
    assert len(jax.live_arrays()) <= len(before)


def test_donated_memory_is_used_again():
    strategy, model, _, train_step, batch = make_loop(2)
    for _ in range(2):
        strategy.run(train_step, args=batch)
    kernel = model.weights[0]
    kept = kernel._value
    pointers = {s.data.unsafe_buffer_pointer() for s in kept.addressable_shards}
    del kept
    strategy.run(train_step, args=batch)
    after = kernel._value.addressable_shards
    assert {s.data.unsafe_buffer_pointer() for s in after} == pointers


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("left", [None, 100_000, 2_000])
def test_the_first_call_traces_once_and_copies_what_there_is_room_for(
    num_replicas, left, monkeypatch
):
    """A copy is there if Ctrl-C comes while JAX compiles and runs at once."""
    strategy = harness.strategy(num_replicas)
    with strategy.scope():
        v = keras.Variable(np.ones(400, "float32"))
    copied, calls = [], []
    copy_of, have_room = arrays.copy_of, arrays.have_room
    monkeypatch.setattr(
        arrays, "copy_of", lambda each: (copied.append(1), copy_of(each))[1]
    )

    class Device:
        """One that tells of its memory, as GPUs do."""

        def memory_stats(self):
            if left is None:
                return None
            return {"bytes_limit": 1_000_000, "bytes_in_use": 1_000_000 - left}

    def room_for(donated):
        shards = [
            types.SimpleNamespace(device=Device(), data=shard.data)
            for each in donated
            for shard in each.addressable_shards
        ]
        return have_room([types.SimpleNamespace(addressable_shards=shards)])

    monkeypatch.setattr(arrays, "have_room", room_for)

    @keras_dist.function
    def step():
        calls.append(v.value)
        v.assign_add(v * 1.0)

    for _ in range(2):
        strategy.run(step)
    assert len(calls) == 1 and len(copied) == (left != 2_000)
    np.testing.assert_array_equal(v.numpy(), 4.0)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_first_call_that_makes_variables_is_traced_twice(num_replicas):
    """What it made may change its way: here, a scale that was a number."""
    strategy = harness.strategy(num_replicas)
    calls = []
    with strategy.scope():
        v = keras.Variable(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.5), initial_scale=2.0, dynamic_growth_steps=1
        )

    @keras_dist.function
    def step():
        calls.append(optimizer.built)
        loss, grads = keras_dist.value_and_grad(
            lambda: optimizer.scale_loss(v * 1.0), [v]
        )
        optimizer.apply(grads, [v])

    for _ in range(3):
        strategy.run(step)
    assert calls == [False, True]
    assert float(optimizer.dynamic_scale) == 16.0
    assert float(v) == 1.0 - 3 * 0.5 * num_replicas
