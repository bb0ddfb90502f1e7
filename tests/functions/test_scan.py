"""`scan_steps` takes several steps in one call, with the numbers of a loop."""

import keras
import numpy as np
import pytest

import keras_dist
from functions.helpers import TRACES
from functions.helpers import Classifier
from functions.helpers import Unhashable
from functions.helpers import X
from functions.helpers import Y
from functions.helpers import array
from functions.helpers import assert_same
from functions.helpers import batches
from functions.helpers import local
from functions.helpers import replicas
from functions.helpers import strategy_of

ops = keras.ops


@replicas
def test_the_loop_has_the_numbers_of_single_steps(num_replicas):
    ours = Classifier(strategy_of(num_replicas))
    losses, traces = [], []
    for _ in range(2):
        iterator = iter(batches(ours.strategy, X, Y))  # 8, 8 and 6 rows
        stacked = keras_dist.scan_steps(ours.step, iterator, 5)
        losses += sum(part for part in local(stacked)).tolist()
        traces.append(ours.traces)
        with pytest.raises(StopIteration):
            keras_dist.scan_steps(ours.step, iterator, 5)
    # On JAX, four replicas run the last batch of 6 rows uncompiled.
    if TRACES and num_replicas != 4:
        assert traces[0] == traces[1]
    theirs = Classifier(strategy_of(1))
    expected = [theirs.epoch(theirs.step)[0] for _ in range(2)]
    assert_same(losses, np.concatenate(expected).tolist())
    assert_same(
        [array(v) for v in ours.model.weights],
        [array(v) for v in theirs.model.weights],
    )


def test_no_more_steps_than_asked_for_and_any_iterator():
    total = keras.Variable(0.0)

    @keras_dist.function
    def step(x, y):
        total.assign_add(ops.sum(x) + y)
        return {"total": total + 0.0, "none": None, "rows": [x]}

    ones = np.ones(2, "float32")
    iterator = iter([(ones, np.float32(i)) for i in range(5)])
    first = keras_dist.scan_steps(step, iterator, 3)
    assert array(first["total"]).tolist() == [2.0, 5.0, 9.0]
    assert first["none"] is None
    assert array(first["rows"][0]).tolist() == [[1.0, 1.0]] * 3
    rest = keras_dist.scan_steps(step, iterator, 3)
    assert array(rest["total"]).tolist() == [14.0, 20.0]


def test_dicts_are_one_argument_and_results_are_of_each_replica():
    strategy = strategy_of(2)
    numbers = [np.arange(4, dtype="float32") + 4 * i for i in range(3)]
    # Neither the arguments' nor the results' keys are in order.
    data = strategy.experimental_distribute_dataset(
        [{"x": x, "minus": -x} for x in numbers]
    )

    def step(batch):
        context = keras_dist.get_replica_context()
        own = ops.sum(batch["x"])
        total = context.all_reduce("SUM", own)
        return {"own": own, "minus": ops.sum(batch["minus"])}, total, 1.5

    sums, total, python = keras_dist.scan_steps(step, iter(data), 3)
    own = [part.tolist() for part in local(sums["own"])]
    assert own == [[1, 9, 17], [5, 13, 21]]
    minus = [(-part).tolist() for part in local(sums["minus"])]
    assert minus == own
    assert [p.tolist() for p in local(total)] == [[6.0, 22.0, 38.0]] * 2
    assert {tuple(p.tolist()) for p in local(python)} == {(1.5, 1.5, 1.5)}


def test_batches_with_values_of_python_are_steps_of_their_own():
    def step(x, name):
        return x + (1.0 if name == "one" else 2.0)

    ones = np.ones(2, "float32")
    iterator = iter([(ones, "one"), (ones, "two"), (ones, "two")])
    result = keras_dist.scan_steps(step, iterator, 3)
    assert array(result).tolist() == [[2.0, 2.0], [3.0, 3.0], [3.0, 3.0]]


def test_methods_and_steps_that_build_lazily():
    class Trainer:
        def __init__(self):
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")
            self.traces = 0

        def step(self, x):
            self.traces += 1
            return ops.sum(self.dense(x))

    trainer = Trainer()
    for _ in range(2):
        data = iter([np.ones((2, 3), "float32")] * 4)
        seen = keras_dist.scan_steps(trainer.step, data, 4)
        assert array(seen).tolist() == [6.0] * 4
    traces = trainer.traces
    data = iter([np.ones((2, 3), "float32")] * 4)
    keras_dist.scan_steps(trainer.step, data, 4)
    assert not TRACES or trainer.traces == traces


@pytest.mark.parametrize("other", [None, [1.0], (1.0, 2.0)])
def test_results_that_cannot_be_stacked_say_so(other):
    iterator = iter([np.ones(3, "float32"), np.ones(2, "float32")])
    with pytest.raises(ValueError, match="the same shape"):
        keras_dist.scan_steps(lambda x: x * 2, iterator, 2)
    iterator = iter([(np.ones(2), "a"), (np.ones(2), "b")])
    with pytest.raises(ValueError, match="Steps returned different"):
        keras_dist.scan_steps(
            lambda x, name: (x,) if name == "a" else other, iterator, 2
        )


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_are_a_positive_number(steps):
    with pytest.raises(ValueError, match="positive integer"):
        keras_dist.scan_steps(lambda x: x, iter([1.0]), steps)


def test_in_a_replica_function_it_is_refused():
    strategy = strategy_of(2)

    def step():
        data = iter([np.ones(2, "float32")])
        return keras_dist.scan_steps(lambda x: x, data, 1)

    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(step)


@pytest.mark.parametrize(
    "make", [lambda: {1}, Unhashable, lambda: bytearray(2)]
)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_without_a_hash_is_refused_by_name(number, num_replicas, make):
    def step(x, how):
        return x

    ones = np.ones(2, "float32")
    with (
        strategy_of(num_replicas).scope(),
        pytest.raises(TypeError, match="(?s)`how`.*'step'"),
    ):
        keras_dist.scan_steps(step, iter([(ones, make())] * number), number)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_batches_without_tensors_are_steps_too(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False)

    def step(by):
        total.assign_add(by)
        return total + 0.0

    with strategy.scope():
        found = keras_dist.scan_steps(step, iter([2.0, 2.0, 2.0]), 3)
        for part in strategy.experimental_local_results(found):
            assert array(part).tolist() == [2.0, 4.0, 6.0]
        nothing = keras_dist.scan_steps(lambda: total + 0.0, iter([(), ()]), 2)
        for part in strategy.experimental_local_results(nothing):
            assert array(part).tolist() == [6.0, 6.0]
