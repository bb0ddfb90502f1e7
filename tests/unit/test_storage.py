"""A variable keeps its class and its home through training and programs."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.storage import ShardedStorage
from keras_dist.plugins import Backend
from keras_dist.plugins import override_backend
from keras_dist.testing import MemoryBackend
from sharded.helpers import shards

DEVICES = ["cpu:0", "cpu:1"]


def trained(strategy, optimizer="adam", epochs=1):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, name="dense")]
        )
        model.compile(optimizer, "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    classes = {}
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 6)).astype("float32")
    y = rng.normal(size=(9, 4)).astype("float32")

    def note():
        for variable in [*model.variables, *model.optimizer.variables]:
            kind = type(variable)
            assert classes.setdefault(id(variable), kind) is kind

    note()
    for _ in range(epochs):
        model.fit(x, y, batch_size=4, verbose=0)
        note()
        model.evaluate(x, y, verbose=0)
        note()
    return model


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: keras_dist.MirroredStrategy(DEVICES), "mirrored"),
        (lambda: keras_dist.CentralStorageStrategy(DEVICES), "central"),
        pytest.param(
            lambda: keras_dist.MirroredStrategy(
                DEVICES, optimizer_state="sharded"
            ),
            "sharded",
            marks=shards,
        ),
    ],
)
def test_a_variable_keeps_its_class_and_its_home(make, kind):
    strategy = make()
    model = trained(strategy, epochs=2)
    slots = [v for v in model.optimizer.variables if v.shape == (6, 4)]
    assert len(slots) == 2
    for slot in slots:
        storage = strategy.executor.storage(slot)
        assert storage.kind == kind
        assert isinstance(storage, ShardedStorage) == (kind == "sharded")
        assert tuple(map(str, storage.devices)) == strategy.devices_of(slot)
    kernel = strategy.executor.storage(model.layers[0].kernel)
    assert kernel.kind == ("central" if kind == "central" else "mirrored")
    total = sum(strategy.executor.storage(slots[0]).bytes_kept().values())
    copies = 2 if kind == "mirrored" else 1
    assert total == copies * 6 * 4 * 4


def test_a_program_leaves_the_class_of_an_on_read_variable():
    strategy = keras_dist.MirroredStrategy(DEVICES)
    with strategy.scope():
        counted = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum"
        )
    kind = type(counted)

    @keras_dist.function
    def count(amount):
        counted.assign_add(amount)

    for expected in (4.0, 8.0):
        strategy.run(count, (2.0,))
        assert type(counted) is kind
        strategy.run(lambda: None)
        assert float(counted) == expected
        assert type(counted) is kind
    assert [float(c) for c in counted.values] == [4.0, 4.0]
    counted.assign(3.0)
    assert float(counted) == 3.0


@shards
def test_a_variable_in_parts_is_read_written_and_copied_whole():
    strategy = keras_dist.MirroredStrategy(DEVICES, optimizer_state="sharded")
    model = trained(strategy)
    slot = next(v for v in model.optimizer.variables if v.shape == (6, 4))
    storage = strategy.executor.storage(slot)
    assert storage.is_split
    value = np.arange(24, dtype="float32").reshape(6, 4)
    slot.assign(value)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(slot), value)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(storage.whole()), value
    )
    storage.place()
    for index in range(2):
        copy = keras.ops.convert_to_numpy(storage.read(index))
        np.testing.assert_array_equal(copy, value)
    assert "ShardedVariable" not in repr(slot)


@shards
def test_a_slot_that_devices_cannot_have_parts_of_is_refused():
    class Counting(keras.optimizers.SGD):
        is_elementwise = True

        def build(self, variables):
            super().build(variables)
            self.counts = keras.Variable(
                keras.ops.zeros(variables[0].shape),
                synchronization="on_read",
                aggregation="sum",
            )

    strategy = keras_dist.MirroredStrategy(DEVICES, optimizer_state="sharded")
    refusal = "synchronization='on_read'|add_variable_from_reference"
    with pytest.raises(UnsupportedModelError, match=refusal):
        trained(strategy, Counting(momentum=0.9))


def test_a_backend_without_central_storage_says_so():
    class Copies(MemoryBackend):
        central_executor = Backend.central_executor

    with (
        override_backend(Copies()),
        pytest.raises(UnsupportedModelError, match="CentralStorageStrategy"),
    ):
        keras_dist.CentralStorageStrategy(["gpu:0", "gpu:1"])
