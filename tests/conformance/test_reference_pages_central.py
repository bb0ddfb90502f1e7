"""The examples of CentralStorageStrategy's reference pages, for any backend.

They run with the CPU devices that there are, where the pages have GPUs.
"""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.helpers import compiled
from conformance.helpers import function
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.pages import DEVICES
from conformance.pages import PLACES
from conformance.pages import Range
from conformance.pages import ones_for_ever
from conformance.pages import places
from conformance.pages import shown

MAKERS = {
    "v2": lambda: keras_dist.CentralStorageStrategy(DEVICES, "cpu:3"),
    "experimental": lambda: keras_dist.experimental.CentralStorageStrategy(
        DEVICES, "cpu:0"
    ),
    "v1": lambda: keras_dist.compat.v1.CentralStorageStrategy(DEVICES),
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=MAKERS)
def strategy(request):
    return MAKERS[request.param]()


# All pages: the class, without arguments.
def test_the_class():
    strategy = keras_dist.experimental.CentralStorageStrategy()
    ds = Range(5, 2)
    dist_dataset = strategy.experimental_distribute_dataset(ds)
    seen = []
    with strategy.scope():

        @function
        def train_step(val):
            return val + 1

        for x in dist_dataset:
            result = strategy.run(train_step, args=(x,))
            seen += [n for part in local(result) for n in part.tolist()]
    assert seen == [1, 2, 3, 4, 5]


# Older v2 page: variables are on the CPU, or on the only GPU.
def test_where_variables_are():
    strategy = keras_dist.CentralStorageStrategy()
    with strategy.scope():
        v = keras.Variable(1.0)
    assert strategy.devices_of(v) == ("cpu:0",)
    assert strategy.num_replicas_in_sync == len(keras_dist.list_devices("cpu"))


# All pages: experimental_distribute_dataset.
def test_a_distributed_dataset(strategy):
    dist_dataset = strategy.experimental_distribute_dataset(Range(4, 2))
    assert [shown(x) for x in dist_dataset] == [[[0], [1]], [[2], [3]]]
    for x in dist_dataset:
        assert [places(part) for part in x.values] == [[p] for p in PLACES]


# All pages: reduce, and where the ids were.
def test_a_sum_of_ids(strategy):
    def step_fn():
        context = keras_dist.get_replica_context()
        return tensor(context.replica_id_in_sync_group, "int32")

    per_replica_result = strategy.run(step_fn)
    results = strategy.experimental_local_results(per_replica_result)
    assert [places(each) for each in results] == [[p] for p in PLACES]
    total = strategy.reduce("SUM", per_replica_result, axis=None)
    assert to_numpy(total) == 1


# All pages: reduce, with an axis and without.
def test_with_and_without_an_axis(strategy):
    shares = np.split(np.arange(8.0, dtype="float32"), 2)
    result = strategy.run(lambda: tensor(shares[replica_id(keras_dist)]))
    total = strategy.reduce("sum", result, axis=None)
    assert to_numpy(total).tolist() == [4, 6, 8, 10]
    total = strategy.reduce("sum", result, axis=0)
    assert to_numpy(total).tolist() == 28


# v2: experimental_distribute_values_from_function, each example.
@pytest.mark.parametrize(
    ("value_fn", "expected"),
    [
        (lambda context: tensor(1.0), [1.0, 1.0]),
        (
            lambda context: np.array([3.0, 2.0, 1.0])[
                context.replica_id_in_sync_group
            ],
            [3.0, 2.0],
        ),
        (lambda context: context.num_replicas_in_sync, [2, 2]),
    ],
)
def test_values_from_a_function(strategy, value_fn, expected):
    values = strategy.experimental_distribute_values_from_function(value_fn)
    results = strategy.experimental_local_results(values)
    assert [to_numpy(x).tolist() for x in results] == expected


# v2: gather, with two replicas and with four.
def test_gathering(strategy):
    values = strategy.experimental_distribute_values_from_function(
        lambda _: tensor([[1], [2]], "int32")
    )
    gathered = to_numpy(strategy.gather(values, axis=0))
    assert gathered.tolist() == [[1], [2], [1], [2]]
    four = keras_dist.CentralStorageStrategy([f"cpu:{i}" for i in range(4)])
    single = np.arange(6).reshape(1, 2, 3)
    values = four.experimental_distribute_values_from_function(
        lambda _: tensor(single, "int32")
    )
    for axis, shape in ((0, (4, 2, 3)), (1, (1, 8, 3)), (2, (1, 2, 12))):
        assert to_numpy(four.gather(values, axis=axis)).shape == shape


# All pages: run, each example.
def test_running(strategy):
    @compiled
    def replica_fn(value):
        return value * 2.0

    assert shown(strategy.run(replica_fn, args=(tensor(3.0),))) == [6.0, 6.0]
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: tensor(context.replica_id_in_sync_group, "int32")
    )

    def reduced(value):
        return keras_dist.get_replica_context().all_reduce("sum", value)

    assert shown(strategy.run(reduced, args=(ids,))) == [1, 1]


# compat.v1: make_input_fn_iterator and experimental_run.
def test_an_iterator_of_an_input_function(strategy):
    def input_fn(input_context):
        return ones_for_ever(input_context, global_batch_size=4)

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        iterator.initialize()
        replica_results = strategy.experimental_run(
            lambda rows: rows * 3, iterator
        )
    assert shown(replica_results) == [[[[3.0]]] * 2] * 2


# compat.v1: experimental_make_numpy_dataset.
def test_a_dataset_of_an_array(strategy):
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(5))
    rows = [row for x in dist_dataset for part in shown(x) for row in part]
    assert rows == [1.0] * 10


# All pages: the attributes; scope, and what may be outside of it.
def test_a_model_in_and_out_of_scope(strategy, tmp_path):
    assert strategy.cluster_resolver is None
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        assert keras_dist.get_strategy() is strategy
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert keras_dist.get_strategy() is not strategy
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(x, y, batch_size=4, verbose=0)
    where = strategy.extended.parameter_devices
    for variable in (*loaded.variables, *loaded.optimizer.variables):
        assert strategy.devices_of(variable) == where
