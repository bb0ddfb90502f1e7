"""Workers with several devices, some of which compute a replica's share."""

import functools
import pathlib
import tempfile

import keras
import numpy as np
import pytest

import keras_dist
from parity import cases
from parity import harness
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import state_of
from workers import clusters

pytestmark = pytest.mark.only_on(
    "jax", reason="Replicas have one device on the others."
)
if BACKEND == "jax":
    from backends.jax import test_logical_devices as alone
    from workers import logical_jobs as jobs

NAMES = [
    "weighted",
    "batch_norm_conv_adam",
    "optimizer_global_clipnorm",
    "optimizer_ema",
    "layer_frozen",
    "mixed_float16",
]
# A model, the logical devices of a replica, and what its replicas divide.
MLP, WHOLE_WORKER = ("mlp", 2, "mirrored"), ("mlp", 4, "mirrored")
SHARDED = ("transformer", 2, "variables")
RUNS = [
    (MLP, "adam"),
    (WHOLE_WORKER, "momentum"),
    (("mlp", 2, "optimizer_state"), "adamw"),
    (("transformer", 2, "mirrored"), "adamw"),
    (("transformer", 4, "variables"), "momentum"),
    (SHARDED, "adam"),
]


def launched(job, *args, devices=4):
    return clusters.run(
        getattr(jobs, job), args, workers=2, devices=devices, timeout=500
    )


@functools.cache
def plain(name, optimizer):
    made = alone.made(jobs.MODELS[name], optimizer, metrics=["accuracy"])
    return alone.outcome(*made)


@pytest.mark.parametrize(
    ("kind", "optimizer"), RUNS, ids=["-".join(map(str, r[0])) for r in RUNS]
)
def test_the_numbers_of_one_device(kind, optimizer):
    """With batches of 20 and 19 rows: one divides, and one does not."""
    name, logical, what = kind
    for found, parts in launched("train", kind, optimizer):
        # Adam divides by the roots of squares near zero.
        rtol = 1e-4 if optimizer == "momentum" else 1e-3
        assert_same(found, plain(name, optimizer), rtol)
        rows = 16 if name == "mlp" else 32
        if what == "variables":  # the replicas of all workers divide rows
            rows //= 8 // logical
        assert parts["up/kernel"] == (rows, 64 // logical)


@pytest.mark.parametrize("what", ["mirrored", "variables"])
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_case(name, what):
    """All of its variables that can be are in parts."""
    (case,) = (case for case in cases.CASES if case.name == name)
    for outcome in launched("train_case", what, name):
        assert_same(outcome, harness.plain(case), case.rtol)


@pytest.mark.parametrize("rows", [13, 3])
@pytest.mark.parametrize("kind", [MLP, WHOLE_WORKER, SHARDED])
def test_few_rows(kind, rows):
    """13 do not divide equally, and there are fewer than 4 replicas."""
    model, x = alone.made(jobs.MODELS[kind[0]], "momentum")
    model.fit(
        x[:rows], alone.LABELS[:rows], batch_size=rows, epochs=2, verbose=0
    )
    for found in launched("few_rows", kind, rows):
        assert_same(found, state_of(model), 1e-4)


@pytest.mark.parametrize("kind", [MLP, ("mlp", 2, "variables")])
def test_steps_that_are_not_compiled(kind):
    model, x = alone.made(alone.mlp, "momentum")
    model.run_eagerly = True
    model.fit(x[:26], alone.LABELS[:26], batch_size=13, verbose=0)
    for found in launched("operation_by_operation", kind):
        assert_same(found, state_of(model), 1e-4)


@pytest.mark.parametrize("kind", [MLP, SHARDED, ("mlp", 4, "optimizer_state")])
def test_parts_come_back_from_host_memory(kind):
    for pairs in launched("put_back", kind):
        assert pairs
        for found, expected in pairs:
            assert found.keys() == expected.keys()
            for device, part in expected.items():
                np.testing.assert_array_equal(found[device], part)


@pytest.mark.parametrize(
    ("logical", "is_compiled", "rows"),
    [(2, True, 20), (2, True, 18), (4, True, 19), (2, False, 19)],
)
def test_a_loop_has_the_numbers_of_one_device(logical, is_compiled, rows):
    expected = alone.loop_on_one_device(rows)
    for found in launched("loop", logical, is_compiled, rows):
        for own, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


@functools.cache
def saved_and_loaded(saving, *loading):
    """Saved by workers, loaded by workers of several kinds and plainly."""
    with tempfile.TemporaryDirectory() as folder:
        saved = launched("save", saving, folder)
        loaded = [launched("load", kind, folder) for kind in loading]
        own = keras.models.load_model(f"{folder}/0/model.keras")
        others = [alone.made(jobs.MODELS[saving[0]], "momentum")[0]]
        layout_map = alone.LAYOUTS if saving[0] == "mlp" else alone.ATTENTION
        others.append(
            alone.made(
                jobs.MODELS[saving[0]],
                "momentum",
                alone.strategy(4, layout_map),
            )[0]
        )
        for other in others:
            keras_dist.restore_sharded(other, pathlib.Path(folder, "parts"))
        return saved, loaded, [state_of(each) for each in [own, *others]]


SAVES = [(MLP, WHOLE_WORKER, ("mlp", 2, "variables")), (SHARDED, SHARDED)]


@pytest.mark.parametrize("saves", SAVES, ids=["mirrored", "sharded"])
def test_saved_by_some_and_loaded_by_others(saves):
    saved, loaded, plainly = saved_and_loaded(*saves)
    first = saved[0]["saved"]
    same = functools.partial(assert_same, expected=first, rtol=0, atol=0)
    for worker in saved:
        same(worker["saved"])
        same(worker["set"])
        assert not any(worker["zeros"])
    for state in plainly:
        same(state)
    gone_on = [worker["gone_on"] for each in loaded for worker in each]
    for each, (_, logical, _) in zip(loaded, saves[1:], strict=True):
        for worker in each:
            for how in ("restored", "loaded", "weights"):
                if how == "weights":
                    keys = [k for k in first if k.startswith("weights")]
                    assert_same(
                        {k: worker[how][k] for k in keys},
                        {k: first[k] for k in keys},
                        rtol=0,
                        atol=0,
                    )
                else:
                    same(worker[how])
            assert worker["part"][1] == 64 // logical
    for state in gone_on[1:]:
        assert_same(state, gone_on[0], 1e-4)


def test_the_chief_alone_writes_and_may_read_alone():
    saved, _, _ = saved_and_loaded(*SAVES[0])
    assert saved[1]["files"] == []
    assert {"model.keras", "some.weights.h5"} <= set(saved[0]["files"])


@pytest.mark.parametrize(
    ("shape", "replicas"), [([1, 1, 1, 2], 4), ([2, 1, 1, 2], 2)]
)
def test_the_cores_of_a_tpu(shape, replicas):
    expected = alone.outcome(*alone.made(alone.mlp, "momentum"))
    for count, part, found in launched("cores", shape):
        assert (count, part) == (replicas, (16, 64 * replicas // 8))
        assert_same(found, expected, 1e-4)


def test_what_can_not_be_is_refused_on_all_workers():
    for found in launched("refused"):
        assert found["count"].startswith("DeviceError: ")
        assert "logical_devices=3 and 4 device(s)" in found["count"]
        for name, texts in {
            "maps": ["up/kernel': (None, ", "up/kernel': ('logical', "],
            "numbers": ["2 logical device(s)", "4 logical device(s)"],
            "kinds": ["variables='mirrored'", "variables='sharded'"],
        }.items():
            assert found[name].startswith("ClusterError: All workers have to")
            assert all(text in found[name] for text in texts)
        assert found["cores"].startswith("DeviceError: ")
        assert "replica 0 with cores of the hosts [0, 1]" in found["cores"]
        assert found["after"] == 4


def test_reports_of_a_model():
    total = 4 * ((16 * 64 + 64 + 64 * 32) + 2 * (2 * 32 + 32 * 5 + 5))
    for same, kept, notes, sent in launched("verified"):
        assert same
        assert kept == tuple((f"cpu:{i}", 16 * 32 * 4) for i in range(4))
        assert any("keras-dist plan --target" in note for note in notes)
        # A worker sends what one of its replicas has.
        assert sent == [("devices", 4 * total), ("workers", 2 * total)]
