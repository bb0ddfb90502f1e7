"""What is left of `tf.distribute`'s first interface."""

import numpy as np
import pytest

import keras_dist
from conformance.contract import contract

KINDS = {
    "mirrored": lambda: keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one": lambda: keras_dist.OneDeviceStrategy("cpu:0"),
    "default": keras_dist.get_strategy,
}


each_kind = pytest.mark.parametrize("kind", KINDS)


def _batches():
    return [np.arange(4.0), np.arange(4.0, 6.0)]


def _rows(strategy, value):
    parts = strategy.unwrap(value)
    return [float(row) for part in parts for row in part]


@contract(194, native=False)
@each_kind
def test_an_iterator_starts_again(kind):
    strategy = KINDS[kind]()
    iterator = strategy.make_dataset_iterator(_batches())
    assert iterator.initialize() == []
    assert _rows(strategy, iterator.get_next()) == [0.0, 1.0, 2.0, 3.0]
    assert iterator.initializer == []
    assert _rows(strategy, iterator.get_next()) == [0.0, 1.0, 2.0, 3.0]
    assert _rows(strategy, iterator.get_next()) == [4.0, 5.0]
    with pytest.raises(keras_dist.OutOfRangeError, match="initialize"):
        iterator.get_next()


@each_kind
def test_running_with_an_iterator_is_deprecated(kind):
    strategy = KINDS[kind]()
    iterator = strategy.make_dataset_iterator(_batches())
    with pytest.warns(DeprecationWarning, match="`run`"):
        result = strategy.experimental_run(lambda rows: rows * 2, iterator)
    assert _rows(strategy, result) == [0.0, 2.0, 4.0, 6.0]
    with pytest.warns(DeprecationWarning, match="`run`"):
        assert strategy.experimental_run(lambda: None) is None


@each_kind
def test_an_input_function_is_for_a_worker(kind):
    strategy = KINDS[kind]()
    mode = keras_dist.InputReplicationMode.PER_REPLICA
    with pytest.raises(ValueError, match="not supported.*PER_REPLICA"):
        strategy.make_input_fn_iterator(lambda _: _batches(), mode)


@each_kind
def test_what_sessions_needed_is_accepted(kind):
    strategy = KINDS[kind]()
    config = {"threads": 1}
    copied = strategy.update_config_proto(config)
    assert copied == config
    assert copied is not config
    assert strategy.configure(session_config=config) is None
    assert strategy.group([1.0]) is None


def test_losses_are_summed():
    reduction = keras_dist.compat.v1.get_loss_reduction()
    assert reduction is keras_dist.ReduceOp.SUM


def test_both_generations_are_strategies():
    old = keras_dist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
    assert isinstance(old, keras_dist.compat.v1.Strategy)
    assert isinstance(old, keras_dist.Strategy)
    assert repr(old) == "<MirroredStrategy on cpu:0, cpu:1>"
