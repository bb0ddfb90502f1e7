"""What a compiled replica function costs, counted."""

import gc
import re
import types

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from keras_dist_jax.placement import arrays

ROWS = 16


def strategy_of(num_replicas):
    return keras_dist.MirroredStrategy(
        [f"cpu:{i}" for i in range(num_replicas)]
    )


def make_loop(num_replicas, layers=2, optimizer="adam"):
    strategy = strategy_of(num_replicas)
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

    @keras_dist.function
    def train_step(x, y):
        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return keras_dist.compute_average_loss(
                keras.losses.sparse_categorical_crossentropy(
                    y, logits, from_logits=True
                ),
                global_batch_size=ROWS,
            )

        loss, grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        optimizer.apply(grads, model.trainable_variables)
        return loss

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8)).astype("float32")
    y = rng.integers(0, 3, ROWS).astype("int32")
    dataset = strategy.experimental_distribute_dataset([(x, y)])
    (batch,) = dataset
    return strategy, model, optimizer, train_step, batch


def programs(name):
    found = jax.devices()[0].client.live_executables()
    return [e for e in found if e.hlo_modules()[0].name == f"jit_{name}"]


def count_all_reduces(program):
    text = program.hlo_modules()[0].to_string()
    return len(re.findall(r"\ball-reduce(?:-start)?\(", text))


@pytest.mark.parametrize("layers", [2, 5, 20])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_one_all_reduce_however_many_variables(layers, optimizer):
    strategy, _, _, train_step, batch = make_loop(2, layers, optimizer)
    before = programs("train_step")
    strategy.run(train_step, args=batch)
    (program,) = [e for e in programs("train_step") if e not in before]
    assert count_all_reduces(program) == 1


def test_one_replica_meets_nobody():
    strategy, _, _, train_step, batch = make_loop(1)
    before = programs("train_step")
    strategy.run(train_step, args=batch)
    (program,) = [e for e in programs("train_step") if e not in before]
    assert count_all_reduces(program) == 0


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


def test_what_a_user_holds_is_not_donated():
    strategy, model, _, train_step, batch = make_loop(2)
    strategy.run(train_step, args=batch)
    held = model.weights[0].value
    shard = strategy.experimental_local_results(model.weights[0])[0].value
    numbers = np.array(held)
    for _ in range(2):
        strategy.run(train_step, args=batch)
    np.testing.assert_array_equal(held, numbers)
    np.testing.assert_array_equal(shard, numbers)
    assert not np.array_equal(ops.convert_to_numpy(model.weights[0]), numbers)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("left", [None, 100_000, 2_000])
def test_the_first_call_traces_once_and_copies_what_there_is_room_for(
    num_replicas, left, monkeypatch
):
    """A copy is there if Ctrl-C comes while JAX compiles and runs at once."""
    strategy = strategy_of(num_replicas)
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
    strategy = strategy_of(num_replicas)
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
