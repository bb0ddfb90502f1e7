"""Per-replica values: made, taken apart, printed, and no tensors outside."""

import copy
import operator
import pickle

import keras
import numpy as np
import pytest

from conformance.contract import contract
from conformance.helpers import is_distributed
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import raw
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import through_framework_tree
from conformance.helpers import to_numpy

NESTS = {
    "dict": lambda x: {"a": x, "b": x + 1},
    "list": lambda x: [x, x + 1],
    "tuple": lambda x: (x, x + 1),
    "nest": lambda x: {"a": [x, (x + 1, {"b": x + 2})], "c": x},
}


@contract(93)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("from_run", [True, False])
def test_local_results_of_nests(api, strategy, nest, from_run):
    count = strategy.num_replicas_in_sync
    if from_run:
        value = strategy.run(lambda: NESTS[nest](tensor(replica_id(api))))
    else:
        value = per_replica(strategy, lambda i: NESTS[nest](tensor(i)))
    results = strategy.experimental_local_results(value)
    assert type(results) is tuple
    expected = tuple(NESTS[nest](float(i)) for i in range(count))
    assert tuple(map(to_numpy, results)) == expected
    assert [type(part) for part in results] == [type(p) for p in expected]


@contract(94)
def test_local_results_without_tensors(api, two):
    value = two.run(lambda: {"a": 1.0, "b": 2.0})
    expected = ({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0})
    assert two.experimental_local_results(value) == expected


@contract(95)
def test_local_results_of_one_value(api, strategy, single):
    assert strategy.experimental_local_results(4.0) == (4.0,)
    for value in (tensor([1.0]), single.run(lambda: tensor(4.0))):
        (result,) = strategy.experimental_local_results(value)
        assert result is value


@contract(96)
@pytest.mark.parametrize("value", [1.0, np.ones(2), "text", None])
def test_values_from_a_function_are_never_unwrapped(api, mirrored, value):
    made = per_replica(mirrored, lambda i: value)
    assert isinstance(made, api.PerReplica)
    assert isinstance(made, api.DistributedValues)
    assert len(made.values) == mirrored.num_replicas_in_sync
    for part in made.values:
        np.testing.assert_array_equal(part, value)


@contract(96)
def test_a_nest_from_a_function_is_a_nest_of_values(api, mirrored):
    made = per_replica(mirrored, lambda i: (1.0, {"a": i}))
    assert type(made) is tuple
    assert isinstance(made[0], api.PerReplica)
    assert isinstance(made[1]["a"], api.PerReplica)
    count = mirrored.num_replicas_in_sync
    assert numbers(made[0]) == [1.0] * count
    assert numbers(made[1]["a"]) == [*range(count)]


@contract(96, native=False)
@pytest.mark.parametrize("value", [1.0, (1.0, 2.0), None])
def test_values_from_a_function_of_one_replica(api, single, value):
    made = per_replica(single, lambda i: value)
    assert not is_distributed(made)
    assert made == value


@contract(97)
def test_the_function_is_told_where_it_is(api, strategy):
    count = strategy.num_replicas_in_sync
    seen = []

    def value_fn(context):
        assert isinstance(context, api.experimental.ValueContext)
        seen.append(
            (context.replica_id_in_sync_group, context.num_replicas_in_sync)
        )
        return context.replica_id_in_sync_group

    made = strategy.experimental_distribute_values_from_function(value_fn)
    assert seen == [(i, count) for i in range(count)]
    assert numbers(made) == [*range(count)]


@contract(98)
def test_contexts_print_where_they_are(api):
    context = api.experimental.ValueContext(1, 2)
    printed = " ".join(str(context).split())
    assert printed.endswith(
        "distribute.ValueContext(replica id 1, total replicas in sync: 2)"
    ) or printed == (
        "keras_dist.ValueContext(replica id 1, total replicas in sync: 2)"
    )
    printed = str(api.InputContext())
    assert printed.endswith("InputContext(input pipeline id 0, total: 1)")
    printed = str(api.InputContext(4, 3, 8))
    assert printed.endswith("InputContext(input pipeline id 3, total: 4)")


@contract(98)
def test_contexts_have_defaults(api):
    context = api.experimental.ValueContext()
    assert context.replica_id_in_sync_group == 0
    assert context.num_replicas_in_sync == 1
    context = api.InputContext()
    assert context.num_input_pipelines == context.num_replicas_in_sync == 1
    assert context.input_pipeline_id == 0


@contract(99)
def test_the_batch_size_of_a_replica(api):
    context = api.InputContext(
        num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6
    )
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="13"):
        context.get_per_replica_batch_size(13)


@contract(100)
def test_a_per_replica_value_is_no_tensor_outside_of_run(api, mirrored):
    value = per_replica(mirrored, lambda i: tensor(float(i)))
    fragment = "looks like you are using a PerReplica object while not inside"
    with pytest.raises(ValueError, match=fragment):
        keras.ops.convert_to_tensor(value)
    with pytest.raises(ValueError, match=fragment), mirrored.scope():
        keras.ops.convert_to_tensor(value)
    with pytest.raises(TypeError):
        value + 1


@contract(101)
def test_a_per_replica_value_is_a_tensor_inside_of_run(api, mirrored):
    value = per_replica(mirrored, lambda i: tensor([10.0 * i]))
    result = mirrored.run(lambda: keras.ops.convert_to_tensor(value) + 1)
    count = mirrored.num_replicas_in_sync
    assert numbers(result) == [[10.0 * i + 1] for i in range(count)]


@contract(102)
def test_a_per_replica_value_goes_through_trees(api, mirrored):
    value = per_replica(mirrored, lambda i: tensor([10.0 * i]))
    leaves, again = through_framework_tree(value)
    expected = [[10.0 * i] for i in range(mirrored.num_replicas_in_sync)]
    assert [to_numpy(leaf).tolist() for leaf in leaves] == expected
    assert isinstance(again, api.PerReplica)
    assert numbers(again) == expected


@contract(103)
def test_values_are_in_the_order_of_replicas(api, mirrored):
    parts = tuple(
        tensor(10.0 * i) for i in range(mirrored.num_replicas_in_sync)
    )
    value = api.PerReplica(parts)
    assert type(value.values) is tuple
    assert all(a is b for a, b in zip(value.values, parts, strict=True))
    seen = mirrored.run(lambda x: (replica_id(api), x * 1.0), args=(value,))
    count = mirrored.num_replicas_in_sync
    assert numbers(seen[0]) == [*range(count)]
    assert numbers(seen[1]) == [10.0 * i for i in range(count)]


@contract(103)
def test_selecting_is_the_inverse_of_regrouping(api, mirrored):
    value = per_replica(mirrored, lambda i: {"a": object(), "b": [i + 0.5]})
    again = mirrored.run(lambda x: x, args=(value,))
    before = mirrored.experimental_local_results(value)
    after = mirrored.experimental_local_results(again)
    for index, part in enumerate(after):
        assert part["b"] == [index + 0.5]
        assert part["a"] is before[index]["a"]


OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.floordiv, operator.mod, operator.pow),
    *(operator.lt, operator.le, operator.gt, operator.ge),
]


@contract(104)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_variable_has_the_operators_of_its_component(api, two, op):
    with two.scope():
        variable = keras.Variable(
            [0.0, 0.0],
            trainable=False,
            synchronization="on_read",
            aggregation="mean",
        )

    def fn():
        own = [2.0 + replica_id(api), 7.0]
        variable.assign(tensor(own))
        return op(variable, 3.0), op(3.0, variable)

    left, right = two.run(fn)
    for i, seen in enumerate(zip(left.values, right.values, strict=True)):
        own = np.array([2.0 + i, 7.0], "float32")
        np.testing.assert_allclose(to_numpy(seen[0]), op(own, 3.0), rtol=1e-5)
        np.testing.assert_allclose(to_numpy(seen[1]), op(3.0, own), rtol=1e-5)


@contract(104)
def test_a_variable_has_the_attributes_of_its_component(api, two):
    with two.scope():
        v = keras.Variable([[1.0, -2.0]])
    shape, *others = two.run(lambda: (tuple(v.shape), -v + 0.0, abs(v), v[0]))
    assert set(two.experimental_local_results(shape)) == {(1, 2)}
    expected = [[-1.0, 2.0]], [[1.0, 2.0]], [1.0, -2.0]
    assert [numbers(each) for each in others] == [[x, x] for x in expected]


@contract(104, native=False)
def test_values_are_copied_and_pickled(api, two):
    value = per_replica(two, lambda i: np.array([10.0 * i]))
    for again in (
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
    ):
        assert isinstance(again, api.PerReplica)
        assert numbers(again) == [[0.0], [10.0]]


@contract(105)
def test_per_replica_values_print_their_parts(api, two):
    value = per_replica(two, lambda i: 0.5 * i)
    assert repr(value) == str(value) == "PerReplica:{\n  0: 0.0,\n  1: 0.5\n}"
    value = per_replica(two, lambda i: tensor(i, "int32"))
    zero, one = value.values
    assert repr(value) == f"PerReplica:{{\n  0: {zero!r},\n  1: {one!r}\n}}"
    assert str(value) == f"PerReplica:{{\n  0: {zero!s},\n  1: {one!s}\n}}"


@contract(105)
def test_mirrored_values_print_their_parts(api, two):
    with two.scope():
        everywhere = raw(api, keras.Variable(0.0))
    value = two.extended.broadcast_to(tensor(1.0), everywhere)
    zero, one = value.values
    assert isinstance(value, api.Mirrored)
    assert repr(value) == f"Mirrored:{{\n  0: {zero!r},\n  1: {one!r}\n}}"
    assert str(value) == f"Mirrored:{{\n  0: {zero!s},\n  1: {one!s}\n}}"


@contract(105)
@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("MirroredVariable", {}),
        (
            "SyncOnReadVariable",
            {"synchronization": "on_read", "aggregation": "sum"},
        ),
    ],
)
def test_variables_print_their_components(api, two, name, kwargs):
    with two.scope():
        variable = keras.Variable(1.0, trainable=False, name="v", **kwargs)
    printed = repr(raw(api, variable))
    first, zero, one, last = printed.splitlines()
    assert first == f"{name}:{{"
    assert zero.startswith("  0: <") and zero.endswith(">,")
    assert one.startswith("  1: <") and one.endswith(">")
    assert "v" in zero and "replica_1" in one
    assert last == "}"


@contract(105)
def test_options_print_their_fields(api):
    printed = repr(api.InputOptions())
    assert printed.startswith("InputOptions(experimental_fetch_to_device=True")
    assert "PER_WORKER" in printed
    assert repr(api.RunOptions()).startswith(
        "RunOptions(experimental_enable_dynamic_batch_size=True"
    )
    experimental = api.experimental
    options = experimental.CommunicationOptions(
        bytes_per_pack=5,
        timeout_seconds=1.0,
        implementation=experimental.CommunicationImplementation.RING,
    )
    # The class is named `Options` by the original's own modules.
    assert str(options).endswith(
        "Options(bytes_per_pack=5,timeout_seconds=1.0, "
        "implementation=CommunicationImplementation.RING)"
    )
