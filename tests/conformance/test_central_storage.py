"""One copy of each variable: all that replicas are promised, and where it is.

The tests of mirrored variables run again, on a strategy with one copy of each
variable on a device apart.
"""

import keras
import pytest

import keras_dist
from conformance import test_all_reduce
from conformance import test_gather
from conformance import test_merge_call
from conformance import test_metrics_in_run
from conformance import test_models_in_run
from conformance import test_optimizers_in_run
from conformance import test_reduce
from conformance import test_run
from conformance import test_training_in_run
from conformance import test_variable_creation
from conformance import test_variable_reads
from conformance import test_variable_table
from conformance import test_variable_writes
from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.variables import copies
from conformance.variables import in_replicas
from conformance.variables import parts
from conformance.variables import read
from conformance.variables import variable

# The original breaks where ours holds: what it does is in the contract.
APIS = ["keras_dist"]
SAME = (
    test_variable_creation,
    test_variable_reads,
    test_variable_table,
    test_variable_writes,
    test_all_reduce,
    test_gather,
    test_merge_call,
    test_metrics_in_run,
    test_models_in_run,
    test_optimizers_in_run,
    test_reduce,
    test_run,
    test_training_in_run,
)
# About copies on several devices, and about other strategies.
DIFFERENT = {
    "test_a_copy_on_each_device",
    "test_copies_are_not_written_alone",
    "test_wherever_it_is_made",
    "test_paths_are_those_of_plain_variables",
    "test_a_layer_built_in_run_is_one_layer",
    "test_components_of_a_variable_come_back_as_the_variable",
}
for _module in SAME:
    for _name, _test in list(vars(_module).items()):
        _args = getattr(_test, "__code__", None)
        _names = _args.co_varnames[: _args.co_argcount] if _args else ()
        if (
            _name.startswith("test_")
            and _name not in DIFFERENT
            and {"two", "mirrored"} & set(_names)
        ):
            globals()[f"{_module.__name__.split('.')[-1]}_{_name}"] = _test


@pytest.fixture
def two(api):
    """A strategy of 2 replicas, with variables on a device apart."""
    return api.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:3")


@pytest.fixture
def mirrored(two):
    """The same, for tests of several numbers of replicas."""
    return two


@pytest.fixture
def spread():
    """A strategy with variables on two devices apart."""
    return keras_dist.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]
    )


@contract(106, 149, 154, 156, native=False)
@pytest.mark.parametrize("synchronization", ["auto", "on_write"])
def test_one_copy_on_the_parameter_device(api, two, synchronization):
    v = variable(api, two, 1.0, synchronization=synchronization, name="v")
    assert two.devices_of(v) == ("cpu:3",)
    assert two.extended.worker_devices == ("cpu:0", "cpu:1")
    assert two.extended.parameter_devices == ("cpu:3",)
    (only,) = v.values
    assert (only.path, float(only)) == ("v", 1.0)
    assert two.experimental_local_results(v) == (only,)
    assert two.experimental_local_results([v]) == ([v], [v])
    assert str(v).startswith("<Variable path=v, shape=(), dtype=float32")
    assert isinstance(v, keras_dist.DistributedValues)
    # A value for where it is has no components.
    for result, expected in (
        (two.extended.reduce_to("SUM", parts(two, [2.0, 4.0]), v), 6.0),
        (two.extended.broadcast_to(tensor(2.0), v), 2.0),
    ):
        assert keras.ops.is_tensor(result)
        assert to_numpy(result).tolist() == expected


@contract(115, native=False)
@pytest.mark.parametrize("inside", ["scope", "run", "merge_call"])
def test_wherever_it_is_made_it_is_one(api, two, inside):
    """And that one may be written alone."""

    def make(*_):
        return keras.Variable(2.0)

    if inside == "scope":
        with two.scope():
            v = make()
    elif inside == "run":
        v = two.run(make)
    else:
        v = two.run(lambda: api.get_replica_context().merge_call(make))
    assert two.devices_of(v) == ("cpu:3",)
    (only,) = v.values
    assert copies(v) == [2.0, 2.0]
    only.assign(5.0)
    assert copies(v) == [5.0, 5.0]
    assert two.extended.value_container(only) is v


@contract(114, native=False)
def test_a_layer_built_in_run_is_on_the_parameter_device(api, two):
    with two.scope():
        layer = keras.layers.Dense(1)
    outputs = two.run(lambda: layer(keras.ops.ones((2, 3))))
    assert [two.devices_of(w) for w in layer.weights] == [("cpu:3",)] * 2
    first, second = [to_numpy(part).tolist() for part in outputs.values]
    assert first == second


@contract(134, native=False)
def test_what_the_original_refuses_or_sums(api, two):
    none = variable(api, two, 0.0, trainable=False)
    in_replicas(api, two, lambda r: none.assign(r + 1))
    assert read(none) == 1.5
    total = variable(api, two, 0.0, aggregation="sum")
    in_replicas(api, two, lambda r: total.assign(r + 1))
    assert read(total) == 3.0
    own = variable(api, two, 0.0, synchronization="on_read", aggregation="sum")
    in_replicas(api, two, lambda r: own.assign(r + 1))
    assert [part.tolist() for part in local(two.run(own.numpy))] == [1.0, 2.0]
    assert read(own) == 3.0


@contract(183, native=False)
@pytest.mark.parametrize("fetch", [True, False])
def test_input_options(api, two, fetch):
    options = api.InputOptions(experimental_fetch_to_device=fetch)
    (batch,) = two.experimental_distribute_dataset(
        [to_numpy(tensor([1.0, 2.0, 3.0, 4.0]))], options
    )
    assert [part.tolist() for part in local(batch)] == [[1.0, 2.0], [3.0, 4.0]]


@contract(150, native=False)
def test_update_calls_once_for_the_one_copy(api, two):
    v = variable(api, two, 1.0)
    other = variable(api, two, 10.0)
    given = parts(two, [2.0, 3.0])
    seen = []

    def fn(copy, x, scale):
        assert api.in_cross_replica_context()
        seen.append((copy, float(x)))
        copy.assign_add(x * scale)
        other.assign_add(copy)
        return {"sum": copy + x, "none": None}

    result = two.extended.update(v, fn, (given,), {"scale": 2.0})
    assert [(copy is v, x) for copy, x in seen] == [(True, 2.0)]
    assert (read(v), read(other)) == (5.0, 15.0)
    assert to_numpy(result["sum"]).tolist() == 7.0
    assert result["none"] is None
    results = two.extended.update(v, lambda c: c + 0.0, group=False)
    assert [to_numpy(x).tolist() for x in results] == [5.0]


@contract(150, native=False)
def test_update_of_values_of_each_replicas_own(api, two):
    own = variable(api, two, 0.0, synchronization="on_read", aggregation="sum")
    total = variable(api, two, 1.0)
    given = parts(two, [2.0, 3.0])
    two.extended.update(own, lambda c, x: c.assign_add(x * total), (given,))
    assert copies(own) == [2.0, 3.0]
    two.extended.update(own, lambda c, t: c.assign_add(t), (total,))
    assert copies(own) == [3.0, 4.0]


@contract(150, native=False)
def test_an_update_that_fails_says_why(api, two):
    v = variable(api, two, [1.0, 2.0])
    with pytest.raises(ValueError, match="shape"):
        two.extended.update(v, lambda c: c.assign([1.0, 2.0, 3.0]))
    assert read(v) == [1.0, 2.0]
    assert not api.in_cross_replica_context()


@contract(153, native=False)
def test_update_of_what_belongs_to_no_variable(api, two, spread):
    for strategy, keeping in ((two, "cpu:3"), (spread, "cpu:2")):
        v = variable(api, strategy, 1.0)
        locations = strategy.extended.non_slot_devices([v])
        assert locations == (keeping,)
        calls = []

        def fn(x, calls=calls):
            calls.append(None)
            return x + 1.0

        result = strategy.extended.update_non_slot(
            locations, fn, (parts(strategy, [2.0, 4.0]),)
        )
        assert len(calls) == 1
        assert to_numpy(result).tolist() == 3.0
        with pytest.raises(ValueError, match="keeps no variables on 'cpu:0'"):
            strategy.extended.update_non_slot("cpu:0", fn, (1.0,))
    both = spread.extended.update_non_slot(
        ["cpu:2", "cpu:3"], lambda: tensor(1.0), group=False
    )
    assert [to_numpy(x).tolist() for x in both] == [1.0, 1.0]


@contract(119, 149, native=False)
def test_variables_are_spread_by_size(api, spread):
    with spread.scope():
        made = [keras.Variable(keras.ops.zeros((n,))) for n in (8, 5, 2, 4)]
        with spread.extended.colocate_vars_with(made[0]):
            beside = keras.Variable(keras.ops.zeros((100,)))
        optimizer = keras.optimizers.Adam()
        optimizer.build(made)
    where = [spread.devices_of(v)[0] for v in made]
    assert where == ["cpu:2", "cpu:3", "cpu:3", "cpu:3"]
    assert spread.devices_of(beside) == ("cpu:2",)
    for slot in optimizer.variables:
        for v, device in zip(made, where, strict=True):
            if v.shape == slot.shape:
                assert spread.devices_of(slot) == (device,)
    assert spread.extended.parameter_devices == ("cpu:2", "cpu:3")
    assert "variables on cpu:2, cpu:3" in repr(spread)


@contract(160, native=False)
def test_variables_on_several_devices_train(api, spread):
    with spread.scope():
        weights = [keras.Variable([float(i)] * 4) for i in (1, 2, 3)]
        optimizer = keras.optimizers.SGD(0.1)
    assert {spread.devices_of(w) for w in weights} == {("cpu:2",), ("cpu:3",)}
    optimizer.build(weights)

    def step():
        grads = [tensor([1.0 + replica_id(api)] * 4) for _ in weights]
        optimizer.apply(grads, weights)

    spread.run(step)
    for i, w in zip((1, 2, 3), weights, strict=True):
        assert to_numpy(w.value) == pytest.approx([i - 0.3] * 4)
        assert len(spread.devices_of(w)) == 1


@contract(21, native=False)
def test_one_replica_apart_from_its_variables(api):
    strategy = api.CentralStorageStrategy(["cpu:1"], "cpu:2")
    v = variable(api, strategy, 1.0, aggregation="sum")
    assert strategy.devices_of(v) == ("cpu:2",)
    assert strategy.num_replicas_in_sync == 1
    result = strategy.run(lambda x: v.assign_add(x * 2), args=(tensor(3.0),))
    assert to_numpy(result).tolist() == 7.0
    assert read(v) == 7.0
    (batch,) = strategy.experimental_distribute_dataset(
        [to_numpy(tensor([1.0, 2.0]))]
    )
    assert to_numpy(batch).tolist() == [1.0, 2.0]
