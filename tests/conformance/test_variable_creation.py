"""A variable has a copy on each device, and is what it was declared as."""

import copy

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import raw
from conformance.helpers import replica_id
from conformance.helpers import to_numpy
from conformance.variables import SYNCHRONIZATIONS
from conformance.variables import copies
from conformance.variables import parts
from conformance.variables import read
from conformance.variables import refuses
from conformance.variables import variable

ALL_SYNCHRONIZATIONS = ("auto", *SYNCHRONIZATIONS)
kinds = pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
all_kinds = pytest.mark.parametrize("synchronization", ALL_SYNCHRONIZATIONS)


@contract(106)
@all_kinds
def test_a_copy_on_each_device(api, mirrored, synchronization):
    v = variable(api, mirrored, [1.0, 2.0], synchronization=synchronization)
    is_mirrored = synchronization != "on_read"
    kind = "MirroredVariable" if is_mirrored else "SyncOnReadVariable"
    assert str(v).startswith(f"{kind}:{{\n  0: <")
    assert repr(v).startswith(f"{kind}:{{\n  0: <")
    assert copies(v) == [[1.0, 2.0]] * mirrored.num_replicas_in_sync
    assert len(v.values) == mirrored.num_replicas_in_sync
    if api is keras_dist and is_mirrored:
        assert mirrored.devices_of(v) == mirrored.extended.worker_devices


@contract(106, native=False)
@all_kinds
def test_one_replica_has_plain_variables(api, single, synchronization):
    v = variable(api, single, 1.0, synchronization=synchronization)
    assert not isinstance(v, api.DistributedValues)
    assert isinstance(v, keras.Variable)
    assert "MirroredVariable" not in repr(v)
    assert read(v) == 1.0


@contract(106, native=False)
@kinds
def test_a_component_is_a_variable(api, two, synchronization):
    v = variable(api, two, 1.0, synchronization=synchronization)
    for component in v.values:
        assert isinstance(component, keras.Variable)
        assert component.numpy() == 1.0
        assert to_numpy(component.value) == 1.0


@contract(106, native=False)
def test_components_of_its_own_kind_are_written_alone(api, two):
    v = variable(api, two, synchronization="on_read", aggregation="sum")
    _, second = v.values
    second.assign(5.0)
    second.assign_add(2.0)
    second.assign_sub(1.0)
    assert copies(v) == [0.0, 6.0]
    assert read(v) == 6.0


@contract(106, native=False)
def test_copies_are_not_written_alone(api, two):
    v = variable(api, two, 1.0)
    with refuses(ValueError, v):
        v.values[1].assign(5.0)


@contract(107, 111)
@all_kinds
def test_what_was_given_can_be_read(api, two, synchronization):
    with two.scope():
        default = keras.Variable(1.0)
        made = [
            keras.Variable(
                1.0,
                synchronization=synchronization,
                aggregation=aggregation,
                trainable=trainable,
            )
            for aggregation in ("none", "mean", "sum")
            for trainable in (True, False)
        ]
    assert (default.synchronization, default.aggregation) == ("auto", "none")
    assert default.trainable
    assert {v.synchronization for v in made} == {synchronization}
    assert [v.aggregation for v in made[::2]] == ["none", "mean", "sum"]
    assert [v.trainable for v in made] == [True, False] * 3


MEAN_OF_INTEGERS = {"dtype": "int32", "trainable": False, "aggregation": "mean"}


@contract(108, 109, 110)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"synchronization": "none"}, "none"),
        ({"synchronization": "sometimes"}, "synchronization"),
        ({"aggregation": "sometimes"}, "aggregation"),
        *(
            (MEAN_OF_INTEGERS | {"synchronization": each}, "mean")
            for each in ALL_SYNCHRONIZATIONS
        ),
    ],
)
def test_what_can_not_be_declared(api, mirrored, options, says):
    with mirrored.scope(), pytest.raises(ValueError, match=f"(?i){says}"):
        keras.Variable(1.0, **options)


@contract(112, native=False)
def test_paths_are_those_of_plain_variables(api, two):
    with two.scope():
        v = keras.Variable(1.0, name="v")
        dense = keras.layers.Dense(1, name="dense")
        dense.build((None, 1))
    assert (v.name, v.path) == ("v", "v")
    assert dense.kernel.path == "dense/kernel"
    assert [each.path for each in v.values] == ["v", "v/replica_1"]


@contract(48, 113, 115)
@kinds
@pytest.mark.parametrize("inside", ["scope", "run", "merge_call"])
def test_wherever_it_is_made(api, mirrored, synchronization, inside):
    """Random initial values are equal on all replicas."""

    def make(*_):
        v = keras.Variable(
            keras.initializers.RandomNormal(),
            shape=(3,),
            synchronization=synchronization,
        )
        return raw(api, v)

    if inside == "scope":
        with mirrored.scope():
            v = make()
    elif inside == "run":
        v = mirrored.run(make)
    else:
        v = mirrored.run(lambda: api.get_replica_context().merge_call(make))
    first, *others = copies(v)
    assert np.any(np.asarray(first) != 0.0)
    assert others == [first] * (mirrored.num_replicas_in_sync - 1)
    assert "Variable:{" in str(v)
    assert mirrored.extended.variable_created_in_scope(v)


@contract(114)
def test_a_variable_made_on_first_call_is_one(api, mirrored):
    made = {}

    def step():
        if replica_id(api) not in made:
            made[replica_id(api)] = raw(api, keras.Variable(4.0))
        return made[replica_id(api)].assign_add(1.0)

    mirrored.run(step)
    mirrored.run(step)
    assert all(v is made[0] for v in made.values())
    assert copies(made[0]) == [6.0] * mirrored.num_replicas_in_sync


@contract(114, native=False)
def test_a_layer_built_in_run_is_one_layer(api, mirrored):
    with mirrored.scope():
        layer = keras.layers.Dense(1)
    x = keras.ops.ones((2, 3))
    outputs = mirrored.run(lambda: layer(x))
    assert len(layer.weights) == 2
    assert len(layer.kernel.values) == mirrored.num_replicas_in_sync
    first, *others = [to_numpy(part) for part in outputs.values]
    for other in others:
        np.testing.assert_array_equal(other, first)


@contract(116, native=False)
@pytest.mark.parametrize("maker", [0, 1])
def test_every_replica_has_to_make_it(api, mirrored, maker):
    def step():
        if replica_id(api) == maker:
            keras.Variable(1.0)

    with pytest.raises(keras_dist.ReplicaDivergenceError, match=str(maker)):
        mirrored.run(step)
    # The next call is none the worse for it.
    v = mirrored.run(lambda: keras.Variable(1.0))
    assert copies(v) == [1.0] * mirrored.num_replicas_in_sync


@contract(118)
@kinds
def test_a_variable_knows_its_strategy(api, two, synchronization):
    v = variable(api, two, synchronization=synchronization)
    assert v.distribute_strategy is two
    assert two.extended.variable_created_in_scope(v)
    plain = raw(api, keras.Variable(1.0))
    assert not two.extended.variable_created_in_scope(plain)
    other = api.MirroredStrategy(["cpu:2", "cpu:3"])
    assert not other.extended.variable_created_in_scope(v)


@contract(119)
def test_colocation_is_for_own_variables_in_scope(api, two):
    own = variable(api, two)
    plain = raw(api, keras.Variable(1.0))
    colocated = two.extended.colocate_vars_with
    with pytest.raises(RuntimeError, match="Need to be inside"):
        colocated(own).__enter__()
    with two.scope():
        with pytest.raises(ValueError, match="created in this"):
            colocated(plain).__enter__()
        with colocated(own):
            made = variable(api, two, 3.0)
    assert copies(made) == [3.0, 3.0]


@contract(120)
@kinds
def test_a_deep_copy_is_a_variable_of_its_own(api, two, synchronization):
    v = variable(api, two, 1.5, synchronization=synchronization)
    with two.scope():
        copied = copy.deepcopy(v)
    assert type(copied) is type(v)
    assert str(copied).split(":")[0] == str(v).split(":")[0]
    assert copies(copied) == copies(v)
    two.run(lambda: copied.assign(9.0))
    assert copies(copied) == [9.0, 9.0]
    assert copies(v) == [1.5, 1.5]


@contract(120, native=False)
def test_a_deep_copy_keeps_what_differs(api, two):
    v = variable(api, two, synchronization="on_read", aggregation="sum")
    two.run(v.assign, args=(parts(two, [4.0, 3.0]),))
    copied = copy.deepcopy(v)
    assert copies(copied) == [4.0, 3.0]
    assert copied.aggregation == "sum"
    assert read(copied) == 7.0


@contract(121, native=False)
@kinds
def test_it_is_accepted_where_a_variable_is(api, two, synchronization):
    v = variable(
        api, two, [1.0, 2.0], synchronization=synchronization, trainable=False
    )
    assert isinstance(v, keras.Variable)
    assert isinstance(v, keras_dist.DistributedValues)
    assert (v.dtype, tuple(v.shape), v.ndim) == ("float32", (2,), 1)
    layer = keras.layers.Layer()
    layer.state = v
    assert layer.weights == layer.non_trainable_weights == [v]
    doubled = two.run(lambda: keras.ops.multiply(v, 2))
    assert [part.tolist() for part in local(doubled)] == [[2.0, 4.0]] * 2
    tripled = two.run(lambda: keras.ops.convert_to_tensor(v) * 3)
    assert [part.tolist() for part in local(tripled)] == [[3.0, 6.0]] * 2


@contract(122)
def test_an_integer_becomes_a_float(api, two):
    v = variable(api, two, synchronization="on_read", aggregation="sum")
    two.run(lambda: v.assign(1))
    assert copies(v) == [1.0, 1.0]
    assert read(v) == 2.0
