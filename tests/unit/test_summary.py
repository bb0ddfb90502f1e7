"""`keras_dist.summary`: what it counts is what devices keep."""

import math

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.planning.estimates import memory
from keras_dist.planning.estimates import transfers
from keras_dist.plugin.backend import override_backend
from keras_dist.testing.memory import MemoryBackend
from keras_dist.tools.counting import VariableRow
from keras_dist.tools.counting import kept_of
from keras_dist.tools.counting import load_of
from keras_dist.tools.counting import placement_of
from sharded.helpers import elements_of_part
from sharded.helpers import shards

BACKEND = keras.backend.backend()
# Dense 5 x 7 + 7 and 7 x 3 + 3 numbers, BatchNormalization 2 x 7.
TRAINABLE = 4 * (5 * 7 + 7 + 7 * 3 + 3 + 2 * 7)
FROZEN = 4 * 2 * 7
# An int32, or on TensorFlow an int64, and a float32.
COUNTERS = 12 if BACKEND == "tensorflow" else 8


def build():
    """A compiled model with variables of each kind, and no seeds."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(7, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3, name="second"),
        ],
        name="net",
    )
    # With a name, or Keras would count on.
    optimizer = keras.optimizers.Adam(name="adam")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def trained(strategy=None):
    """Such a model, after a step."""
    if strategy is None:
        model = build()
    else:
        with strategy.scope():
            model = build()
    x, y = np.ones((8, 5), "float32"), np.ones((8, 3), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    return model


def mirrored(count, **options):
    names = [f"cpu:{index}" for index in range(count)]
    return keras_dist.MirroredStrategy(names, **options)


def of_group(found, group):
    """The bytes of a group on each device."""
    position = ("trainable", "non-trainable", "optimizer", "metrics").index(
        group
    )
    return {d.device: d.of_groups[position] for d in found.devices}


def kinds(found, group):
    return {row.kind for row in found.rows if row.group == group}


def assert_as_planned(found, model, strategy):
    """What the plan's arithmetic says of the model is what was counted."""
    placement = placement_of(strategy.plan)
    planned = memory(load_of(model), placement)
    assert list(planned) == [each.device for each in found.devices]
    for each in found.devices:
        *kept, metrics = each.of_groups
        assert sum(kept) == planned[each.device].kept
    assert found.transfers == transfers(
        load_of(model), placement, kept_of(model)
    )


def test_mirrored_variables_have_a_copy_on_each_device():
    strategy = mirrored(3)
    model = trained(strategy)
    found = keras_dist.summary(model)
    names = ("cpu:0", "cpu:1", "cpu:2")
    assert kinds(found, "trainable") == {"mirrored"}
    assert kinds(found, "optimizer") == {"mirrored"}
    assert kinds(found, "metrics") == {"on-read"}
    assert of_group(found, "trainable") == dict.fromkeys(names, TRAINABLE)
    assert of_group(found, "non-trainable") == dict.fromkeys(names, FROZEN)
    assert of_group(found, "optimizer") == dict.fromkeys(
        names, 2 * TRAINABLE + COUNTERS
    )
    assert_as_planned(found, model, strategy)


def test_rows_are_the_variables():
    found = keras_dist.summary(trained(mirrored(2)))
    rows = {row.path: row for row in found.rows}
    assert len(rows) == len(found.rows) == 6 + 2 + (2 + 12) + 4
    kernel = rows["net/first/kernel"]
    assert kernel == VariableRow(
        "trainable",
        "net/first/kernel",
        (5, 7),
        "float32",
        "mirrored",
        140,
        (("cpu:0", 140), ("cpu:1", 140)),
    )
    assert rows["net/norm/moving_mean"].group == "non-trainable"
    assert rows["adam/net_first_kernel_velocity"].group == "optimizer"
    assert rows["mean_absolute_error/total"].group == "metrics"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_step_of_mirrored_variables_sends_what_a_ring_does(count):
    found = keras_dist.summary(trained(mirrored(count)))
    (each,) = found.transfers
    assert (each.what, each.between) == ("gradients, all-reduce", "devices")
    assert each.total == found.bytes_sent == 2 * (count - 1) * TRAINABLE
    expected = math.ceil(2 * (count - 1) / count * TRAINABLE)
    assert dict(each.sent) == {f"cpu:{i}": expected for i in range(count)}


def test_central_variables_have_one_copy():
    strategy = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:3")
    model = trained(strategy)
    found = keras_dist.summary(model)
    none = {"cpu:0": 0, "cpu:1": 0}
    assert kinds(found, "trainable") == {"central"}
    assert of_group(found, "trainable") == none | {"cpu:3": TRAINABLE}
    assert of_group(found, "optimizer") == none | {
        "cpu:3": 2 * TRAINABLE + COUNTERS
    }
    there, back = found.transfers
    assert dict(there.sent) == {"cpu:3": 2 * (TRAINABLE + FROZEN)}
    assert dict(back.sent) == {"cpu:0": TRAINABLE, "cpu:1": TRAINABLE}
    assert_as_planned(found, model, strategy)


def test_a_replica_on_the_parameter_device_is_sent_nothing():
    strategy = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    found = keras_dist.summary(trained(strategy))
    there, back = found.transfers
    assert dict(there.sent) == {"cpu:0": TRAINABLE + FROZEN}
    assert dict(back.sent) == {"cpu:1": TRAINABLE}


def test_several_parameter_devices_share_variables():
    parameter_devices = ["cpu:2", "cpu:3"]
    strategy = keras_dist.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], parameter_devices
    )
    model = trained(strategy)
    found = keras_dist.summary(model)
    assert all(len(row.devices) == 1 for row in found.rows)
    kept = of_group(found, "trainable")
    assert kept["cpu:0"] == kept["cpu:1"] == 0
    assert 0 < kept["cpu:2"] < TRAINABLE
    assert kept["cpu:2"] + kept["cpu:3"] == TRAINABLE
    frozen = of_group(found, "non-trainable")
    there, back = found.transfers
    assert dict(there.sent) == {
        name: 2 * (kept[name] + frozen[name]) for name in parameter_devices
    }
    assert dict(back.sent) == {"cpu:0": TRAINABLE, "cpu:1": TRAINABLE}


@shards
@pytest.mark.parametrize("count", [2, 3])
def test_each_device_has_a_part_of_a_sharded_slot(count):
    strategy = mirrored(count, optimizer_state="sharded")
    model = trained(strategy)
    found = keras_dist.summary(model)
    rows = [row for row in found.rows if row.group == "optimizer"]
    assert [row.kind for row in rows] == ["mirrored"] * 2 + ["sharded"] * 12
    expected = COUNTERS
    for row in rows[2:]:
        part = 4 * elements_of_part(row.shape, count)
        assert [kept for _, kept in row.kept] == [part] * count
        expected += part
    assert set(of_group(found, "optimizer").values()) == {expected}
    assert set(of_group(found, "trainable").values()) == {TRAINABLE}
    assert [each.what for each in found.transfers] == [
        "gradients, reduce-scatter",
        "parameters, all-gather",
    ]
    assert found.bytes_sent == 2 * (count - 1) * TRAINABLE


def test_one_device_sends_nothing():
    strategy = keras_dist.OneDeviceStrategy("cpu:1")
    model = trained(strategy)
    found = keras_dist.summary(model)
    assert {row.devices for row in found.rows} == {("cpu:1",)}
    assert kinds(found, "trainable") == {"one copy"}
    assert found.transfers == () and found.bytes_sent == 0
    assert "sends nothing" in str(found)
    assert_as_planned(found, model, strategy)


def test_plain_models_are_shown_too():
    found = keras_dist.summary(trained())
    assert {row.kind for row in found.rows} == {"plain"}
    (device,) = found.devices
    assert device.device == "cpu:0"
    assert device.of_groups[:3] == (
        TRAINABLE,
        FROZEN,
        2 * TRAINABLE + COUNTERS,
    )
    assert (found.transfers, found.strategy) == ((), "")
    assert "no strategy" in str(found)


def test_a_plain_model_is_where_keras_put_it():
    with keras.device("cpu:1" if BACKEND != "torch" else "cpu"):
        model = build()
    found = keras_dist.summary(model)
    device = "cpu:0" if BACKEND == "torch" else "cpu:1"
    assert found.rows[0].devices == (device,)


def test_values_of_replicas_count_beside_the_variables_own():
    strategy = mirrored(2)
    model = trained(strategy)
    before = of_group(keras_dist.summary(model), "metrics")
    metric = next(m for m in model.metrics if m.name == "loss")
    strategy.run(lambda: metric.update_state(1.0))
    after = of_group(keras_dist.summary(model), "metrics")
    assert {d: after[d] - before[d] for d in after} == {"cpu:0": 8, "cpu:1": 8}


def test_slots_that_are_not_there_yet_are_told_of():
    with mirrored(2).scope():
        model = build()
    found = keras_dist.summary(model)
    assert of_group(found, "optimizer")["cpu:0"] == COUNTERS
    assert "makes its slots in the first step" in str(found)
    assert found.bytes_sent == 2 * TRAINABLE


def test_models_need_no_optimizer():
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    found = keras_dist.summary(model)
    assert {row.group for row in found.rows} == {"trainable"}


@pytest.mark.parametrize(
    ("policy", "of_variables"), [("bfloat16", 2), ("mixed_bfloat16", 4)]
)
def test_bytes_are_those_of_the_variables_type(policy, of_variables):
    with mirrored(2).scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, dtype=policy)]
        )
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    found = keras_dist.summary(model)
    assert of_group(found, "trainable")["cpu:1"] == 8 * of_variables
    assert of_group(found, "optimizer")["cpu:1"] == 16 * of_variables + COUNTERS


def test_a_scalar_that_is_trained_has_slots():
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), name="scale")

        def call(self, x):
            return self.scale * x

    model = keras.Sequential([keras.Input((3,)), Scale()])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    load = load_of(model)
    assert [(flat.length, flat.num_bytes) for flat in load.slots] == [
        (1, 4)
    ] * 2
    assert load.counters == COUNTERS


def test_workers_send_each_other_one_sum():
    cpu = Device("cpu", 0), Device("cpu", 1)
    addresses = ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")
    cluster = Cluster(0, addresses[0], addresses)
    plan = Plan(((cpu[0],), (cpu[1],)), cpu, cluster)
    model = build()
    local, wire = transfers(load_of(model), placement_of(plan))
    assert (local.between, local.total) == ("devices", 3 * 2 * TRAINABLE)
    assert dict(local.sent) == {"cpu:0": TRAINABLE, "cpu:1": TRAINABLE}
    assert (wire.between, wire.total) == ("workers", 2 * 2 * TRAINABLE)
    assert len(wire.sent) == 3


def test_any_backend_will_do():
    with override_backend(MemoryBackend()):
        strategy = keras_dist.MirroredStrategy()
        with strategy.scope():
            model = build()
        found = keras_dist.summary(model)
    assert of_group(found, "trainable") == {
        "gpu:0": TRAINABLE,
        "gpu:1": TRAINABLE,
    }


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (keras.Sequential([keras.layers.Dense(2)]), "is not built"),
        ("net", "Received: 'net' of type str"),
    ],
)
def test_what_has_no_variables_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        keras_dist.summary(model)


def test_a_number_of_rows_below_zero_is_refused():
    with pytest.raises(ValueError, match="max_rows.*-1"):
        keras_dist.summary(build(), max_rows=-1)


def test_looking_changes_nothing():
    model = trained(mirrored(2))
    before = [np.array(weight) for weight in model.get_weights()]
    keras_dist.summary(model)
    for was, weight in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, weight)
    x, y = np.ones((8, 5), "float32"), np.ones((8, 3), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
