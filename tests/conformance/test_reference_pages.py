"""The examples of the reference pages run, on any backend.

A comment over each test names the pages and the member it is shown at. Examples
of `run`, `reduce`, `gather` and the methods of logical devices are in the tests
of these methods, and `pages.NOT_RUN` lists those that are nowhere.
"""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.helpers import function
from conformance.helpers import local
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.pages import DEVICES
from conformance.pages import PLACES
from conformance.pages import Range
from conformance.pages import ones_for_ever
from conformance.pages import places
from conformance.pages import shown

MAKERS = {
    "mirrored": lambda: keras_dist.MirroredStrategy(DEVICES),
    "mirrored, v1": lambda: keras_dist.compat.v1.MirroredStrategy(DEVICES),
    "central": lambda: keras_dist.CentralStorageStrategy(DEVICES, "cpu:3"),
    "central, experimental": lambda: (
        keras_dist.experimental.CentralStorageStrategy(DEVICES, "cpu:0")
    ),
    "central, v1": lambda: keras_dist.compat.v1.CentralStorageStrategy(DEVICES),
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=MAKERS)
def strategy(request):
    return MAKERS[request.param]()


@pytest.fixture
def one():
    """What has a single replica on the older pages."""
    return keras_dist.compat.v1.OneDeviceStrategy(device="cpu:0")


def replica_id():
    context = keras_dist.get_replica_context()
    return tensor(context.replica_id_in_sync_group, "int32")


# CentralStorageStrategy: the class without arguments, and where variables are.
def test_central_storage_without_arguments():
    strategy = keras_dist.experimental.CentralStorageStrategy()
    assert strategy.num_replicas_in_sync == len(keras_dist.list_devices("cpu"))
    with strategy.scope():
        v = keras.Variable(1.0)

        @function
        def train_step(val):
            return val + 1

        batches = strategy.experimental_distribute_dataset(Range(5, 2))
        results = [strategy.run(train_step, args=(x,)) for x in batches]
    assert strategy.devices_of(v) == ("cpu:0",)
    seen = [n for x in results for part in local(x) for n in part.tolist()]
    assert seen == [1, 2, 3, 4, 5]


# All pages: experimental_distribute_values_from_function, examples 1 to 4. The
# last ones are on the devices.
def test_values_from_a_function(strategy):
    array = np.array([3.0, 2.0, 1.0])
    placed = []
    for i, name in enumerate(strategy.extended.worker_devices):
        with keras.device(name):
            placed.append(tensor(float(i)))
    for value_fn, expected in (
        (lambda context: tensor(1.0), [1.0, 1.0]),
        (lambda context: array[context.replica_id_in_sync_group], [3.0, 2.0]),
        (lambda context: context.num_replicas_in_sync, [2, 2]),
        (lambda context: placed[context.replica_id_in_sync_group], [0.0, 1.0]),
    ):
        values = strategy.experimental_distribute_values_from_function(value_fn)
        assert isinstance(values, keras_dist.DistributedValues)
        assert shown(values) == expected
    assert [places(x) for x in values.values] == [[name] for name in PLACES]


# All pages: reduce, and where the ids and their sum are. The older ones: its
# default axis, and experimental_run without an iterator.
def test_a_sum_of_ids_and_where_it_is(strategy, one):
    result = strategy.run(replica_id)
    results = strategy.experimental_local_results(result)
    assert [places(each) for each in results] == [[name] for name in PLACES]
    total = strategy.reduce("SUM", result, axis=None)
    assert to_numpy(total) == 1
    if strategy.extended.parameter_devices[0] == "cpu:0":
        assert "cpu:0" in places(total)
    assert shown(strategy.experimental_run(replica_id)) == [0, 1]
    assert shown(one.experimental_run(replica_id)) == [0]
    assert to_numpy(one.reduce("SUM", one.run(replica_id))) == 0
    assert to_numpy(one.reduce("SUM", tensor([1.0, 2.0]))).tolist() == [1, 2]


# MirroredStrategy: scope.
def test_variables_in_and_out_of_scope():
    with keras_dist.MirroredStrategy(DEVICES).scope():
        mirrored_variable = keras.Variable(1.0, name="inside")
    assert repr(mirrored_variable) == (
        "MirroredVariable:{\n"
        "  0: <Variable path=inside, shape=(), dtype=float32, value=1.0>,\n"
        "  1: <Variable path=inside/replica_1, shape=(), dtype=float32, "
        "value=1.0>\n"
        "}"
    )
    regular_variable = keras.Variable(1.0, name="outside")
    assert repr(regular_variable) == (
        "<Variable path=outside, shape=(), dtype=float32, value=1.0>"
    )


# All pages: the attributes; what entering a scope does, and what may be outside
# of it.
def test_a_model_in_and_out_of_scope(strategy, tmp_path):
    assert strategy.cluster_resolver is None
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        assert keras_dist.get_strategy() is strategy
        assert keras_dist.in_cross_replica_context()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        v = keras.Variable(1.0)
    assert keras_dist.get_strategy() is not strategy
    assert not keras_dist.in_cross_replica_context()
    v.assign_add(1.0)
    assert {float(component.numpy()) for component in v.values} == {2.0}

    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(x, y, batch_size=4, verbose=0)
    where = strategy.extended.parameter_devices
    for variable in (*loaded.variables, *loaded.optimizer.variables):
        assert strategy.devices_of(variable) == where


# All pages: experimental_distribute_dataset, and
# experimental_make_numpy_dataset, on the older ones with a session.
def test_parts_of_a_range(strategy, one):
    for each in (strategy, one):
        dataset = each.experimental_make_numpy_dataset(
            np.ones([10], dtype=np.float32), session=None
        )
        data = each.experimental_distribute_dataset(dataset.batch(5))
        rows = [row for x in data for part in shown(x) for row in part]
        assert rows == [1.0] * 10
    batches = list(strategy.experimental_distribute_dataset(Range(5, 2)))
    assert [shown(x) for x in batches] == [[[0], [1]], [[2], [3]], [[4], []]]
    for x in batches:
        assert [places(part) for part in x.values] == [[p] for p in PLACES]
    results = [strategy.run(lambda val: val + 1, args=(x,)) for x in batches]
    assert [shown(x) for x in results] == [[[1], [2]], [[3], [4]], [[5], []]]


# All pages: distribute_datasets_from_function, and its older name.
@pytest.mark.parametrize("prefix", ["", "experimental_"])
def test_datasets_from_a_function(strategy, prefix):
    contexts = []

    def dataset_fn(input_context):
        contexts.append(input_context)
        return ones_for_ever(input_context, global_batch_size=8)

    method = getattr(strategy, f"{prefix}distribute_datasets_from_function")
    steps = zip(range(3), method(dataset_fn), strict=False)
    results = [strategy.run(lambda x: x, args=(batch,)) for _, batch in steps]
    assert [shown(x) for x in results] == [[[[[1.0]]] * 4] * 2] * 3
    for context in contexts:
        assert context.num_replicas_in_sync == 2
        assert context.num_input_pipelines == 1
        assert context.input_pipeline_id == 0


# compat.v1: make_input_fn_iterator, which only supports PER_WORKER.
@pytest.mark.parametrize(
    "mode", [(), (keras_dist.InputReplicationMode.PER_WORKER,)]
)
def test_an_iterator_of_an_input_function(strategy, mode):
    def input_fn(input_context):
        return ones_for_ever(input_context, global_batch_size=4)

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn, *mode)
        iterator.initialize()
        replica_results = strategy.experimental_run(
            lambda rows: rows * 3, iterator
        )
    assert shown(replica_results) == [[[[3.0]]] * 2] * 2
    results = strategy.extended.call_for_each_replica(
        lambda rows: rows + 1, args=(iterator.get_next(),)
    )
    assert shown(results) == [[[[2.0]]] * 2] * 2
