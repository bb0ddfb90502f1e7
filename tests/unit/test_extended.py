"""`extended` updates copies alike, and does so beyond the contract's cases."""

import keras
import pytest

import keras_dist
from conformance.helpers import to_numpy


def _two():
    # No fixture: its threads end with the test.
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def _variable(strategy, value=1.0, **kwargs):
    with strategy.scope():
        return keras.Variable(value, **kwargs)


def _values(value):
    return [float(component) for component in value.values]


def _parts(*values):
    return keras_dist.PerReplica(list(values))


def test_each_copy_of_another_variable_is_written_once():
    strategy = _two()
    v, total = _variable(strategy), _variable(strategy)
    own = _variable(strategy, 0.0, synchronization="on_read", aggregation="sum")

    def fn(copy, x):
        copy.assign_add(2.0)
        total.assign_add(copy)
        own.assign_add(x + total)

    strategy.extended.update(v, fn, (_parts(1.0, 3.0),))
    assert _values(v) == [3.0, 3.0]
    assert _values(total) == [4.0, 4.0]
    assert _values(own) == [5.0, 7.0]


def test_copy_and_variable_are_one_thing_in_an_update():
    strategy = _two()
    v, kept = _variable(strategy), []

    def fn(copy):
        assert keras_dist.in_cross_replica_context()
        assert keras_dist.get_strategy() is strategy
        assert keras_dist.get_replica_context() is None
        kept.append(copy)
        copy.assign(5.0)
        assert float(v.value) == float(copy) == 5.0
        v.assign_add(1.0)
        return copy + 0.0

    result = strategy.extended.update(v, fn, group=False)
    assert not keras_dist.has_strategy()
    assert [float(x) for x in result] == [6.0, 6.0]
    assert float(v) == 6.0
    # After the update, a copy is a component.
    v.assign(7.0)
    assert [float(copy) for copy in kept] == [7.0, 7.0]
    assert strategy.extended.value_container(kept[1]) is v


@pytest.mark.parametrize("trainable", [True, False])
def test_copies_that_may_not_differ(trainable):
    strategy = _two()
    v = _variable(strategy, trainable=trainable)
    with pytest.raises(
        keras_dist.ReplicaDivergenceError, match="copies of variable"
    ):
        strategy.extended.update(
            v, lambda copy, x: copy.assign(x), (_parts(1.0, 3.0),)
        )
    assert _values(v) == [1.0, 1.0]


def test_updates_in_a_merge():
    strategy = _two()
    v = _variable(strategy)

    def merge(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, destinations=v)
        strategy.extended.update(v, lambda c, t: c.assign_add(t), (total,))

    def step(x):
        keras_dist.get_replica_context().merge_call(merge, (x,))
        return v + 0.0

    result = strategy.run(step, (_parts(1.0, 2.0),))
    assert [to_numpy(part) for part in result.values] == [4.0, 4.0]
    assert _values(v) == [4.0, 4.0]


def test_destinations_are_devices_of_the_strategy():
    strategy = _two()
    extended, calls = strategy.extended, []
    with pytest.raises(ValueError, match="(?s)'cpu:2'.*colocate_with"):
        extended.update_non_slot(["cpu:2"], lambda: None)
    extended.update_non_slot("cpu:1", lambda: calls.append(None))
    assert len(calls) == 1
    with pytest.raises(ValueError, match="destination"):
        extended.reduce_to("MEAN", 1.0, [])
    with pytest.raises(keras_dist.DeviceError, match="cpu:9"):
        extended.reduce_to("MEAN", 1.0, "cpu:9")
    nest = extended.reduce_to("SUM", {"a": [_parts(1.0, 3.0)]}, "cpu:1")
    assert float(nest["a"][0]) == 4.0


@pytest.mark.parametrize("synchronization", ["auto", "on_read"])
def test_a_variable_stands_for_all_devices_of_its_strategy(synchronization):
    strategy = _two()
    v = _variable(strategy, synchronization=synchronization, aggregation="sum")
    extended, calls = strategy.extended, []
    total = extended.reduce_to("SUM", _parts(1.0, 3.0), v)
    assert _values(total) == [4.0, 4.0]
    copies = extended.broadcast_to(keras.ops.ones(()) * 5.0, v)
    assert _values(copies) == [5.0, 5.0]
    extended.update_non_slot(
        extended.non_slot_devices([v]), lambda: calls.append(None)
    )
    assert len(calls) == 2


def test_the_default_strategy_updates_plain_variables():
    extended = keras_dist.get_strategy().extended
    v = keras.Variable(1.0)
    result = extended.update(v, lambda copy, x: copy is v and x, (True,))
    assert result is True
    assert extended.variable_created_in_scope(v)
    assert extended.non_slot_devices([v]) == ()
    assert extended.update_non_slot((), lambda: 3) == 3
    with extended.colocate_vars_with(v):
        pass


def test_constants():
    strategy = _two()
    extended = strategy.extended
    assert not extended.experimental_require_static_shapes
    assert not extended.experimental_between_graph
    assert extended.experimental_should_init
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert len(list(extended.experimental_make_numpy_dataset([1, 2]))) == 2
