"""`keras_dist.summary` tells what each device keeps of a model, and sends."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.planning.estimates import memory
from keras_dist.planning.estimates import transfers
from keras_dist.tools.counting import VariableRow
from keras_dist.tools.counting import kept_of
from keras_dist.tools.counting import load_of
from keras_dist.tools.counting import placement_of
from keras_dist.tools.summary import Summary
from sharded.helpers import elements_of_part
from sharded.helpers import shards

BACKEND = keras.backend.backend()
# Dense 5 x 7 + 7 and 7 x 3 + 3 numbers, BatchNormalization 2 x 7.
TRAINABLE = 4 * (5 * 7 + 7 + 7 * 3 + 3 + 2 * 7)
FROZEN = 4 * 2 * 7
# An int32, or on TensorFlow an int64, and a float32.
COUNTERS = 12 if BACKEND == "tensorflow" else 8
X, Y = np.ones((8, 5), "float32"), np.ones((8, 3), "float32")
CPUS = [f"cpu:{index}" for index in range(4)]
GROUPS = ("trainable", "non-trainable", "optimizer", "metrics")
SIZES = dict(
    zip(GROUPS, (TRAINABLE, FROZEN, 2 * TRAINABLE + COUNTERS), strict=False)
)


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
    with (strategy or keras_dist.get_strategy()).scope():
        model = build()
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def mirrored(count, **options):
    return keras_dist.MirroredStrategy(CPUS[:count], **options)


def central(*parameter_devices):
    return keras_dist.CentralStorageStrategy(CPUS[:2], parameter_devices)


def of_group(found, group):
    """The bytes of a group on each device."""
    position = GROUPS.index(group)
    return {d.device: d.of_groups[position] for d in found.devices}


def kinds(found, group):
    return {row.kind for row in found.rows if row.group == group}


@pytest.mark.parametrize(
    ("make", "kind", "holders", "sent"),
    [
        (lambda: mirrored(3), "mirrored", CPUS[:3], 4 * TRAINABLE),
        (
            lambda: central("cpu:3"),
            "central",
            ["cpu:3"],
            4 * TRAINABLE + 2 * FROZEN,
        ),
        # What is on the keeper itself is not sent.
        (
            lambda: central("cpu:0"),
            "central",
            ["cpu:0"],
            2 * TRAINABLE + FROZEN,
        ),
        (
            lambda: keras_dist.OneDeviceStrategy("cpu:1"),
            "one copy",
            ["cpu:1"],
            0,
        ),
    ],
    ids=["mirrored", "central", "central here", "one device"],
)
def test_what_devices_keep_and_send_is_what_was_planned(
    make, kind, holders, sent
):
    strategy = make()
    model = trained(strategy)
    found = keras_dist.summary(model)
    devices = [each.device for each in found.devices]
    assert kinds(found, "trainable") == kinds(found, "optimizer") == {kind}
    for group, size in SIZES.items():
        expected = dict.fromkeys(devices, 0) | dict.fromkeys(holders, size)
        assert of_group(found, group) == expected
    placement = placement_of(strategy.plan)
    planned = memory(load_of(model), placement)
    assert list(planned) == devices
    for each in found.devices:
        assert sum(each.of_groups[:3]) == planned[each.device].kept
    assert found.bytes_sent == sent
    # The arithmetic of `keras-dist plan`.
    assert found.transfers == transfers(
        load_of(model), placement, kept_of(model)
    )
    assert ("sends nothing" in str(found)) == (not sent)


def test_several_parameter_devices_share_variables():
    found = keras_dist.summary(trained(central("cpu:2", "cpu:3")))
    assert all(len(row.devices) == 1 for row in found.rows)
    kept = of_group(found, "trainable")
    assert kept["cpu:0"] == kept["cpu:1"] == 0 < kept["cpu:2"] < TRAINABLE
    assert kept["cpu:2"] + kept["cpu:3"] == TRAINABLE
    frozen = of_group(found, "non-trainable")
    there, back = found.transfers
    assert dict(there.sent) == {
        name: 2 * (kept[name] + frozen[name]) for name in ("cpu:2", "cpu:3")
    }
    assert dict(back.sent) == {"cpu:0": TRAINABLE, "cpu:1": TRAINABLE}


@shards
@pytest.mark.parametrize("count", [2, 3])
def test_each_device_has_a_part_of_a_sharded_slot(count):
    found = keras_dist.summary(
        trained(mirrored(count, optimizer_state="sharded"))
    )
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


def test_plain_models_are_shown_where_keras_put_them():
    found = keras_dist.summary(trained())
    assert {row.kind for row in found.rows} == {"plain"}
    (device,) = found.devices
    assert device.device == "cpu:0"
    assert device.of_groups[:3] == tuple(SIZES.values())
    assert (found.transfers, found.strategy) == ((), "")
    assert "no strategy" in str(found)
    with keras.device("cpu:1" if BACKEND != "torch" else "cpu"):
        found = keras_dist.summary(build())
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
        plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    found = keras_dist.summary(model)
    assert of_group(found, "optimizer")["cpu:0"] == COUNTERS
    assert "makes its slots in the first step" in str(found)
    assert found.bytes_sent == 2 * TRAINABLE
    (row, _) = keras_dist.summary(plain).rows  # which needs no optimizer
    assert row.group == "trainable"


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
    slots = [(flat.length, flat.num_bytes) for flat in load.slots]
    assert slots == [(1, 4)] * 2
    assert load.counters == COUNTERS


def test_workers_send_each_other_one_sum():
    cpu = Device("cpu", 0), Device("cpu", 1)
    addresses = ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")
    plan = Plan(
        ((cpu[0],), (cpu[1],)), cpu, Cluster(0, addresses[0], addresses)
    )
    local, wire = transfers(load_of(build()), placement_of(plan))
    assert (local.between, local.total) == ("devices", 3 * 2 * TRAINABLE)
    assert (wire.between, wire.total) == ("workers", 2 * 2 * TRAINABLE)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: keras.Sequential([keras.layers.Dense(2)]),
            {},
            "is not built",
        ),
        (lambda: "net", {}, "Received: 'net' of type str"),
        (build, {"max_rows": -1}, "max_rows.*-1"),
    ],
)
def test_what_can_not_be_shown_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        keras_dist.summary(make(), **options)


def test_looking_changes_nothing():
    model = trained(mirrored(2))
    before = [np.array(weight) for weight in model.get_weights()]
    keras_dist.summary(model)
    for was, weight in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, weight)
    model.fit(X, Y, batch_size=8, verbose=0)


def test_what_is_shown(capsys, monkeypatch):
    """In a terminal, by `print`, and in a notebook."""
    monkeypatch.setenv("COLUMNS", "80")
    found = keras_dist.summary(trained(mirrored(4)))
    rows = {row.path: row for row in found.rows}
    assert len(rows) == len(found.rows) == 6 + 2 + (2 + 12) + 4
    assert rows["net/first/kernel"] == VariableRow(
        *("trainable", "net/first/kernel", (5, 7), "float32", "mirrored", 140),
        tuple((device, 140) for device in CPUS),
    )
    assert rows["net/norm/moving_mean"].group == "non-trainable"
    assert rows["adam/net_first_kernel_velocity"].group == "optimizer"
    assert rows["mean_absolute_error/total"].group == "metrics"
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        *("'net'", "MirroredStrategy", "net/first/kernel", "cpu:0-3"),
        *("140 B", "Each device keeps", "all-reduce"),
    ):
        assert part in text
    assert "\x1b" not in text
    found.show()
    shown = capsys.readouterr().out.rstrip().splitlines()
    assert [line.rstrip() for line in shown] == [
        line.rstrip() for line in text.splitlines()
    ]
    assert "net/first/kernel" in in_notebook(found)
    assert "cpu:0-3" in in_notebook(found)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(found) == text
    assert repr(found).startswith("<Summary of 'net': 26 variables on cpu:0")


def test_large_models_are_cut_and_counted_all_the_same():
    model = trained()
    cut = keras_dist.summary(model, max_rows=8)
    whole = keras_dist.summary(model, max_rows=None)
    assert cut.rows == whole.rows and cut.devices == whole.devices
    assert sum(len(shown) for _, shown, _ in cut.shown_rows()) == 8
    assert "and 12 more" in str(cut)
    assert "more" not in str(whole).split("Each device")[0]
    none = keras_dist.summary(model, 0)
    for group, shown, hidden in none.shown_rows():
        assert not shown
        assert f"{len(hidden)} variables" in str(none), group
    # A group that needs less leaves it to others.
    cut = keras_dist.summary(model, max_rows=20)
    shown = [len(shown) for _, shown, _ in cut.shown_rows()]
    assert shown == [6, 2, 8, 4]


def in_notebook(found):
    return found._repr_mimebundle_((), ())["text/html"]


def test_notebooks_show_names_as_they_are():
    row = VariableRow("trainable", "<b>&", (1,), "float32", "plain", 4, ())
    found = Summary("<i>", "", (row,), ("cpu:0",), (), ("a < b",))
    text = in_notebook(found)
    for part in ("&lt;b&gt;&amp;", "&lt;i&gt;", "a &lt; b"):
        assert part in text
    assert "<b>" not in text
    assert "[bold]" in str(dataclasses.replace(found, model="[bold]"))
