"""A step costs few Python calls, traces, operations and copies of variables."""

import collections

import keras
import numpy as np
import pytest
from step_graphs import graph_of
from step_graphs import step_of

from backends.classifier import classifier
from backends.classifier import rows
from bench.loops import PortableLoop
from bench.native.tensorflow import native_loop
from bench.settings import Setting
from keras_dist.bench import measure
from parity.harness import strategy as strategy_of

X, Y = rows(43)


def make_model(*layers, **options):
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, activation="relu")
    return classifier(hidden, *layers, **options)


def traces(model):
    """How often each compiled part of a model's functions was traced.

    From Keras 3.16, executions of one step don't run the part for several.
    """
    functions = (model.train_function, model.test_function)
    cells = [c.cell_contents for f in functions for c in f.__closure__]
    parts = [*cells, *(getattr(cell, "__wrapped__", None) for cell in cells)]
    counts = [
        part.experimental_get_tracing_count()
        for part in parts
        if hasattr(part, "experimental_get_tracing_count")
    ]
    return [count for count in counts if count]


def test_two_replicas_cost_little_more_than_plain_keras(calls_a_step):
    with strategy_of(2).scope():
        model = make_model()
    assert calls_a_step(model, X, Y) <= 1.15 * calls_a_step(make_model(), X, Y)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_of_a_loop_costs_what_a_tf_function_does(num_replicas):
    devices = tuple(f"cpu:{i}" for i in range(num_replicas))
    setting = Setting("small", devices)
    arms = PortableLoop(setting), native_loop(setting)
    for arm in arms:
        arm(4)
    ours, native = (measure.calls_a_step(arm)[0] for arm in arms)
    assert 0 < ours <= 1.1 * native


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_nothing_is_traced_after_the_first_epoch(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model = make_model(keras.layers.BatchNormalization())
    plain = make_model(keras.layers.BatchNormalization())
    options = {"batch_size": 8, "verbose": 0, "validation_data": (X, Y)}
    for each in (model, plain):
        each.fit(X, Y, epochs=1, **options)
    first = traces(model)
    pairs = zip(first, traces(plain), strict=True)
    assert all(own <= by_keras for own, by_keras in pairs)
    model.fit(X, Y, epochs=2, **options)
    with strategy.scope():
        model.fit(X, Y, epochs=1, **options)
    assert traces(model) == first


def test_batches_of_known_size_are_traced_once_less_than_by_plain_keras():
    def outcome(model):
        for count in (8, 3, 1, 2, 8, 5):
            model.train_on_batch(X[:count], Y[:count])
        step = step_of(model.train_function)
        return step.experimental_get_tracing_count()

    with strategy_of(3).scope():
        model = make_model()
    # Of plain Keras, a trace that makes metrics and slots is thrown away.
    assert outcome(model) == outcome(make_model()) - 1


def test_metrics_are_not_updated_by_each_replica():
    """One update of accuracy and loss, however many replicas."""

    def assignments(num_replicas):
        with strategy_of(num_replicas).scope():
            model = make_model(weighted_metrics=["accuracy"])
        model.train_on_batch(X[:8], Y[:8])
        kinds = collections.Counter(
            op.type for op in graph_of(model, X[:8], Y[:8]).get_operations()
        )
        return kinds["AssignVariableOp"], len(model.metrics_variables)

    (two, variables), (four, _) = assignments(2), assignments(4)
    copied = (four - two) / 2
    assert two - 2 * copied == variables


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_each_device_holds_an_equal_copy(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model = make_model(keras.layers.BatchNormalization())
    model.fit(X, Y, batch_size=8, verbose=0)
    names = tuple(f"cpu:{i}" for i in range(num_replicas))
    for variable in model.metrics_variables:
        assert strategy.devices_of(variable) == names[:1]
    for variable in model.weights + model.optimizer.variables:
        assert strategy.devices_of(variable) == names
        copies = [copy.numpy() for copy in variable.value.values]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
