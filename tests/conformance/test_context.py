"""Scopes, contexts and threads know their strategy, and don't mix."""

import contextlib
import copy
import threading

import keras
import pytest
from keras.src.backend.common.name_scope import current_path

import keras_dist
from conformance.contract import contract
from conformance.helpers import ELSEWHERE
from conformance.helpers import compiled
from conformance.helpers import numbers
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import to_numpy


def in_default_state(api):
    context = api.get_replica_context()
    assert context is not None
    assert context.strategy is api.get_strategy()
    assert context.num_replicas_in_sync == 1
    assert not api.in_cross_replica_context()
    assert not api.has_strategy()
    assert api.get_strategy() is api.get_strategy()
    assert api.get_strategy().num_replicas_in_sync == 1
    return True


def in_scope_of(api, strategy):
    assert api.get_replica_context() is None
    assert api.in_cross_replica_context()
    assert api.has_strategy()
    assert api.get_strategy() is strategy
    return True


@contract(1)
def test_without_a_strategy_there_is_the_default_one(api):
    assert in_default_state(api)


@contract(2)
def test_scope_is_cross_replica_context(api, scoped):
    with scoped.scope():
        assert in_scope_of(api, scoped)
    assert in_default_state(api)


@contract(3)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_run_is_replica_context(api, scoped, inside, old):
    run = scoped.extended.call_for_each_replica if old else scoped.run
    seen = []

    def fn():
        seen.append(
            (
                api.get_replica_context().strategy is scoped,
                api.in_cross_replica_context(),
                api.has_strategy(),
                api.get_strategy() is scoped,
            )
        )

    with scoped.scope() if inside else contextlib.nullcontext():
        run(fn)
    assert seen == [(True, False, True, True)] * scoped.num_replicas_in_sync
    assert in_default_state(api)


@contract(4)
def test_a_scope_can_be_nested(api, scoped):
    first = scoped.scope()
    with first:
        with scoped.scope():
            assert in_scope_of(api, scoped)
        assert in_scope_of(api, scoped)
        with first:
            assert in_scope_of(api, scoped)
        assert in_scope_of(api, scoped)
    assert in_default_state(api)
    if api is keras_dist:  # again, when all were left
        with first:
            assert in_scope_of(api, scoped)
        assert in_default_state(api)


@contract(5)
def test_scopes_of_two_strategies_do_not_mix(api, scoped):
    other = api.OneDeviceStrategy("cpu:2")
    with scoped.scope():
        with (
            pytest.raises(RuntimeError, match="Mixing different") as raised,
            other.scope(),
        ):
            pass
        assert in_scope_of(api, scoped)
        keras.Variable(1.0)
    assert in_default_state(api)
    if api is keras_dist:
        assert isinstance(raised.value, keras_dist.StrategyMismatchError)
        assert repr(scoped) in str(raised.value)
        assert repr(other) in str(raised.value)


@contract(6)
def test_the_default_scope_changes_nothing(api):
    default = api.get_strategy()
    with default.scope():
        assert in_default_state(api)
        with default.scope():
            assert in_default_state(api)
        assert in_default_state(api)
    assert in_default_state(api)


@contract(7)
def test_nothing_is_made_in_a_scope_inside_of_the_default_one(api, scoped):
    with (
        pytest.raises(RuntimeError, match="Mixing different"),
        api.get_strategy().scope(),
        scoped.scope(),
    ):
        keras.Variable(1.0)
    assert in_default_state(api)
    with scoped.scope():
        assert to_numpy(keras.Variable(1.0)) == 1.0


@contract(8)
def test_the_default_scope_is_refused_inside_of_another(api, scoped):
    default = api.get_strategy()
    with scoped.scope():
        with (
            pytest.raises(RuntimeError, match="Must not nest"),
            default.scope(),
        ):
            pass
        assert in_scope_of(api, scoped)
    assert in_default_state(api)


@contract(9)
def test_a_strategy_can_be_set_without_a_with(api, scoped):
    other = api.OneDeviceStrategy("cpu:2")
    try:
        api.experimental_set_strategy(scoped)
        assert in_scope_of(api, scoped)
        api.experimental_set_strategy(other)
        assert in_scope_of(api, other)
    finally:
        api.experimental_set_strategy(None)
    assert in_default_state(api)


@contract(10)
def test_no_strategy_can_be_set_inside_of_a_scope(api, scoped):
    with scoped.scope():
        for anything in (scoped, None, api.OneDeviceStrategy("cpu:2")):
            with pytest.raises(RuntimeError, match="Must not be called inside"):
                api.experimental_set_strategy(anything)
            assert in_scope_of(api, scoped)
    assert in_default_state(api)


@contract(11, native=False)
def test_a_scope_is_not_left_around_an_open_device(api, two):
    scope = two.scope()
    scope.__enter__()
    with (
        keras.device(ELSEWHERE),
        pytest.raises(RuntimeError, match="nesting error"),
    ):
        scope.__exit__(None, None, None)
    scope.__exit__(None, None, None)
    assert in_default_state(api)


@contract(12)
def test_a_new_thread_is_in_the_default_state(api, scoped):
    seen = []
    with scoped.scope():
        thread = threading.Thread(
            target=lambda: seen.append(in_default_state(api))
        )
        thread.start()
        thread.join()
    assert seen == [True]


CROSS = {
    "reduce": lambda s, v: s.reduce("MEAN", 1.0, axis=None),
    "gather": lambda s, v: s.gather(tensor([1.0]), axis=0),
    "reduce_to": lambda s, v: s.extended.reduce_to("MEAN", 1.0, "cpu:0"),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to(
        "MEAN", [(tensor(1.0), "cpu:0")]
    ),
    "update": lambda s, v: s.extended.update(v, lambda part: None),
}


@pytest.fixture
def variable(api, scoped):
    with scoped.scope():
        made = keras.Variable(1.0)
    return made if api is keras_dist else made.value


@contract(13)
@pytest.mark.parametrize("method", CROSS)
def test_cross_replica_methods_in_and_out_of_scope(
    api, scoped, variable, method
):
    CROSS[method](scoped, variable)
    with scoped.scope():
        CROSS[method](scoped, variable)
    with (
        api.OneDeviceStrategy("cpu:2").scope(),
        pytest.raises(RuntimeError, match="Mixing different"),
    ):
        CROSS[method](scoped, variable)
    assert in_default_state(api)


@contract(14)
@pytest.mark.parametrize("method", ["reduce", "reduce_to", "batch_reduce_to"])
def test_cross_replica_methods_in_replica_context(
    api, scoped, variable, method
):
    with pytest.raises(RuntimeError, match="cross-replica context") as raised:
        scoped.run(lambda: CROSS[method](scoped, variable))
    assert in_default_state(api)
    if api is keras_dist and method == "reduce":
        assert "merge_call()" in str(raised.value)


@contract(15)
def test_run_inside_of_run(api, scoped):
    with pytest.raises(RuntimeError, match="cross-replica context"):
        scoped.run(lambda: scoped.run(lambda: 1.0))
    assert in_default_state(api)


@contract(16)
def test_strategies_are_copied_deeply_only(api, scoped):
    with pytest.raises(RuntimeError, match="Must only deepcopy"):
        copy.copy(scoped)
    again = copy.deepcopy(scoped)
    assert again.num_replicas_in_sync == scoped.num_replicas_in_sync
    ones = again.run(lambda: tensor(1.0))
    total = again.reduce("SUM", ones, axis=None)
    assert float(total) == scoped.num_replicas_in_sync


@contract(17)
def test_strategies_of_one_process_have_no_cluster(api, strategy):
    assert strategy.cluster_resolver is None


@contract(18)
def test_each_replica_has_its_number(api, strategy):
    count = strategy.num_replicas_in_sync
    ids = []
    strategy.run(
        lambda: ids.append(api.get_replica_context().replica_id_in_sync_group)
    )
    assert sorted(map(int, ids)) == list(range(count))
    if api is keras_dist:
        assert ids == list(range(count))
        assert {type(number) for number in ids} == {int}
    assert api.get_replica_context().replica_id_in_sync_group == 0
    assert isinstance(api.get_replica_context().replica_id_in_sync_group, int)


@contract(19)
def test_the_number_can_be_captured_by_what_is_compiled_twice(api, mirrored):
    def fn():
        number = replica_id(api)
        add = compiled(lambda x: x + number)
        return add(tensor(10.0)), add(tensor([20.0, 30.0]))

    scalars, rows = mirrored.run(fn)
    count = mirrored.num_replicas_in_sync
    assert numbers(scalars) == [10.0 + i for i in range(count)]
    assert numbers(rows) == [[20.0 + i, 30.0 + i] for i in range(count)]


@contract(20, native=False)
@pytest.mark.parametrize(
    "again", ["cpu:0", "CPU:0", "/cpu:0", "/job:localhost/device:CPU:0"]
)
def test_a_device_is_named_once(api, again):
    with pytest.raises(ValueError, match="(?s)cpu:0.*named 2 times"):
        api.MirroredStrategy(["cpu:0", again])


@contract(21, native=False)
def test_unknown_devices_are_refused(api):
    assert api.MirroredStrategy([]).num_replicas_in_sync == len(
        api.list_devices("cpu")
    )
    for wrong in ("cpu:99", "gpu:99", "disk:0", "cpu:x", ""):
        with pytest.raises(api.DeviceError):
            api.MirroredStrategy(["cpu:0", wrong])
        with pytest.raises(ValueError):
            api.OneDeviceStrategy(wrong)


@contract(22, native=False)
def test_replicas_inherit_the_callers_state(api, strategy):
    was_filtering = keras.config.is_traceback_filtering_enabled()
    seen = []

    def fn():
        filters = keras.config.is_traceback_filtering_enabled()
        policy = keras.config.dtype_policy().name
        seen.append((current_path(), filters, policy))

    try:
        keras.config.disable_traceback_filtering()
        keras.config.set_dtype_policy("mixed_bfloat16")
        with keras.name_scope("outer"):
            strategy.run(fn)
    finally:
        keras.config.set_dtype_policy("float32")
        if was_filtering:
            keras.config.enable_traceback_filtering()
    expected = ("outer", False, "mixed_bfloat16")
    assert seen == [expected] * strategy.num_replicas_in_sync


@contract(22, native=False)
def test_what_a_replica_opens_is_its_own(api, mirrored):
    def fn():
        context = api.get_replica_context()
        name = f"replica{context.replica_id_in_sync_group}"
        with keras.name_scope(name):
            context.merge_call(lambda strategy: None)
            return current_path() == name

    assert all(mirrored.experimental_local_results(mirrored.run(fn)))
    assert current_path() == ""
