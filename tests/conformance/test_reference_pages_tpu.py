"""The examples of TPUStrategy's reference pages run, on any backend.

The tests' CPU devices stand in for a TPU.
"""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import function
from conformance.helpers import local
from conformance.pages import NOT_RUN
from conformance.pages import Range
from conformance.pages import shown
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import HasLogicalDevices

COUNT = 4  # the tests' CPU devices
MAKERS = {
    "current": keras_dist.TPUStrategy,
    "experimental": keras_dist.experimental.TPUStrategy,
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*TPUStrategy:DeprecationWarning"
)


@pytest.fixture
def resolver():
    return keras_dist.cluster_resolver.TPUClusterResolver(tpu="virtual")


@pytest.fixture(params=MAKERS)
def strategy(request, resolver):
    keras_dist.tpu.experimental.initialize_tpu_system(resolver)
    return MAKERS[request.param](resolver)


def _assignment(resolver, **options):
    topology = keras_dist.tpu.experimental.initialize_tpu_system(resolver)
    return keras_dist.tpu.experimental.DeviceAssignment.build(
        topology, **options
    )


def dataset_fn(context):
    x = np.random.default_rng(0).random((8, 5)).astype("float32")
    y = np.arange(8).reshape(8, 1) % 2
    return [(x[i : i + 1], y[i : i + 1]) for i in range(8)]


# The class: a training loop.
def test_a_training_loop(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(learning_rate=0.1)
        optimizer.build(model.trainable_variables)
    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    before = model.get_weights()[0]

    @function
    def step_fn(features, labels):
        def loss_fn():
            logits = model(features, training=True)
            return keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels, logits, from_logits=True
                )
            )

        variables = model.trainable_variables
        loss, grads = keras_dist.value_and_grad(loss_fn, variables)
        optimizer.apply(grads, variables)
        return loss

    for batch in dist_dataset:
        strategy.run(step_fn, args=batch)
    assert int(optimizer.iterations) == 8 // COUNT
    assert np.abs(model.get_weights()[0] - before).max() > 1e-3
    for variable in model.variables:
        copies = strategy.experimental_local_results(variable)
        assert len(copies) == COUNT


# The class: an addition on logical device 0, here with one for each replica.
def test_adding_on_logical_device_0(resolver):
    strategy = keras_dist.TPUStrategy(
        resolver,
        experimental_device_assignment=_assignment(
            resolver, computation_shape=[1, 1, 1, 1], num_replicas=COUNT
        ),
    )
    iterator = iter(
        strategy.experimental_distribute_dataset(Range(2 * COUNT, COUNT))
    )

    def step_fn(features):
        output = keras.ops.add(features, features)
        return strategy.experimental_assign_to_logical_device(output, 0)

    found = strategy.run(step_fn, args=(next(iterator),))
    assert shown(found) == [[0], [2], [4], [6]]


# experimental_split_to_logical_devices and
# experimental_replicate_to_logical_devices, one logical device each.
@contract("L-1", "L-2", "L-3", native=False)
def test_splitting_in_spmd_mode(resolver):
    strategy = keras_dist.TPUStrategy(
        resolver, experimental_spmd_xla_partitioning=True
    )

    def step_fn():
        images = keras.ops.ones((2, 4, 4, 1))
        images = strategy.experimental_split_to_logical_devices(
            images, [1, 1, 1, 1]
        )
        return strategy.experimental_replicate_to_logical_devices(images)

    assert [part.sum() for part in local(strategy.run(step_fn))] == [32] * COUNT
    with pytest.raises(ValueError, match="In SPMD mode"):
        strategy.experimental_assign_to_logical_device(1.5, 0)


# The examples with 2 and with 8 logical devices for each replica.
@pytest.mark.parametrize("shape", NOT_RUN, ids=str)
def test_what_is_not_run_is_refused_elsewhere(shape):
    experimental = keras_dist.tpu.experimental
    places = np.indices((2, 2, 2, 2)).reshape(4, -1).T
    topology = experimental.Topology(
        mesh_shape=[2, 2, 2, 2], device_coordinates=places[None]
    )
    assignment = experimental.DeviceAssignment.build(topology, shape)
    is_able = isinstance(get_backend(), HasLogicalDevices)
    reason = "no TPU here" if is_able else f"{np.prod(shape)} logical devices"
    with pytest.raises(ValueError, match=reason):
        keras_dist.TPUStrategy(experimental_device_assignment=assignment)


# cluster_resolver, num_replicas_in_sync, extended.
def test_the_attributes(strategy, resolver):
    assert strategy.cluster_resolver is resolver
    assert strategy.num_replicas_in_sync == COUNT
    extended = strategy.extended
    assert (extended.num_hosts, extended.num_replicas_per_host) == (1, COUNT)
    assert extended.worker_devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert extended.parameter_devices == extended.worker_devices
    feature = extended.tpu_hardware_feature
    assert isinstance(feature, keras_dist.tpu.experimental.HardwareFeature)
    assert feature.embedding_feature is feature.EmbeddingFeature.UNSUPPORTED
    assert feature.num_embedding_devices_per_chip == 0
    assert extended.should_checkpoint
    assert extended.should_save_summary
