"""What `extended` does beyond the contract's assertions."""

import keras
import pytest

import keras_dist
from conformance.helpers import to_numpy


def _two():
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def _variable(strategy, value=1.0, **kwargs):
    with strategy.scope():
        return keras.Variable(value, **kwargs)


def _values(variable):
    return [float(component) for component in variable.values]


def test_each_copy_of_another_variable_is_written_once():
    strategy = _two()
    v, total = _variable(strategy), _variable(strategy)
    own = _variable(strategy, 0.0, synchronization="on_read", aggregation="sum")
    x = keras_dist.PerReplica([1.0, 3.0])

    def fn(copy, x):
        copy.assign_add(2.0)
        total.assign_add(copy)
        own.assign_add(x + total)

    strategy.extended.update(v, fn, (x,))
    assert _values(v) == [3.0, 3.0]
    assert _values(total) == [4.0, 4.0]
    assert _values(own) == [5.0, 7.0]


def test_copy_and_variable_are_one_thing_in_an_update():
    strategy = _two()
    v = _variable(strategy)

    def fn(copy):
        copy.assign(5.0)
        assert float(v.value) == float(copy) == 5.0
        v.assign_add(1.0)
        return copy + 0.0

    result = strategy.extended.update(v, fn, group=False)
    assert [float(x) for x in result] == [6.0, 6.0]
    assert float(v) == 6.0


@pytest.mark.parametrize("trainable", [True, False])
def test_copies_that_may_not_differ(trainable):
    strategy = _two()
    v = _variable(strategy, trainable=trainable)
    x = keras_dist.PerReplica([1.0, 3.0])
    with pytest.raises(
        keras_dist.ReplicaDivergenceError, match="copies of variable"
    ):
        strategy.extended.update(v, lambda copy, x: copy.assign(x), (x,))
    assert _values(v) == [1.0, 1.0]


def test_an_update_is_in_cross_replica_context():
    strategy = _two()
    v = _variable(strategy)
    seen = []

    def fn(copy):
        seen.append(
            (
                keras_dist.in_cross_replica_context(),
                keras_dist.get_strategy() is strategy,
                keras_dist.get_replica_context() is None,
            )
        )

    strategy.extended.update(v, fn)
    assert seen == [(True, True, True)] * 2
    assert not keras_dist.has_strategy()


def test_updates_in_a_merge():
    strategy = _two()
    v = _variable(strategy)

    def merge(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, destinations=v)
        strategy.extended.update(v, lambda c, t: c.assign_add(t), (total,))

    def step(x):
        keras_dist.get_replica_context().merge_call(merge, (x,))
        return v + 0.0

    x = keras_dist.PerReplica([1.0, 2.0])
    result = strategy.run(step, (x,))
    assert [to_numpy(part) for part in result.values] == [4.0, 4.0]
    assert _values(v) == [4.0, 4.0]


def test_a_copy_is_a_component_after_the_update():
    strategy = _two()
    v = _variable(strategy)
    kept = []
    strategy.extended.update(v, kept.append)
    v.assign(7.0)
    assert [float(copy) for copy in kept] == [7.0, 7.0]
    assert strategy.extended.value_container(kept[1]) is v


def test_other_devices_than_its_own_are_refused():
    strategy = _two()
    with pytest.raises(ValueError, match="'cpu:2'.*colocate_with"):
        strategy.extended.update_non_slot(["cpu:2"], lambda: None)


def test_one_of_its_devices():
    strategy = _two()
    calls = []
    strategy.extended.update_non_slot("cpu:1", lambda: calls.append(None))
    assert len(calls) == 1


def test_there_has_to_be_a_destination():
    strategy = _two()
    with pytest.raises(ValueError, match="destination"):
        strategy.extended.reduce_to("MEAN", 1.0, [])
    with pytest.raises(keras_dist.DeviceError, match="cpu:9"):
        strategy.extended.reduce_to("MEAN", 1.0, "cpu:9")


@pytest.mark.parametrize("synchronization", ["auto", "on_read"])
def test_a_variable_stands_for_all_devices_of_its_strategy(synchronization):
    strategy = _two()
    v = _variable(strategy, synchronization=synchronization, aggregation="sum")
    extended = strategy.extended
    total = extended.reduce_to("SUM", keras_dist.PerReplica([1.0, 3.0]), v)
    assert [float(copy) for copy in total.values] == [4.0, 4.0]
    copies = extended.broadcast_to(keras.ops.ones(()) * 5.0, v)
    assert [float(copy) for copy in copies.values] == [5.0, 5.0]
    calls = []
    extended.update_non_slot(
        extended.non_slot_devices([v]), lambda: calls.append(None)
    )
    assert len(calls) == 2


def test_nests_are_reduced_leaf_by_leaf():
    strategy = _two()
    value = {"a": [keras_dist.PerReplica([1.0, 3.0])]}
    result = strategy.extended.reduce_to("SUM", value, "cpu:1")
    assert float(result["a"][0]) == 4.0


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
