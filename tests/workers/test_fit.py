"""`fit` on several workers gives one device's numbers, however they share."""

import functools
import importlib.util

import pytest

from parity.harness import BACKEND
from parity.harness import BACKENDS
from parity.harness import assert_same
from parity.harness import drop_iterations
from parity.harness import plain
from parity.kinds import KINDS
from parity.kinds import outcome_of
from sharded.helpers import SHARDS
from sharded.helpers import SHARDS_ON_DEVICES
from workers import clusters
from workers import jobs

CASES = {n: case for n, case in jobs.CASES.items() if BACKEND in case.backends}
EVERYWHERE = ["weighted", "batch_norm_conv_adam", "fewer_than_replicas"]
NAMES = [
    *EVERYWHERE,
    *("mask_gru", "two_headed", "even", "one", "last_of_one_batch_norm"),
    *("optimizer_global_clipnorm", "optimizer_accumulation", "optimizer_ema"),
    *("loss_sum", "loss_mean_with_sample_weight", "loss_dice"),
    *("mask_of_the_loss", "layer_add_loss", "layer_regularizers"),
    *("layer_sums_over_rows", "layer_no_numbers", "loss_own_call"),
    *("layer_own_compute_loss", "steps_per_execution", "mixed_float16"),
]
# With one replica, a worker sees nothing of the others' indices.
LOOKUPS = [name for name in jobs.CASES if name.startswith("lookups")]
CENTRAL = [
    *(*EVERYWHERE, "optimizer_global_clipnorm", "optimizer_accumulation"),
    *("optimizer_ema", "layer_no_numbers"),
]
SHARDED = [
    *(*EVERYWHERE, "optimizer_adamw", "optimizer_global_clipnorm"),
    *("optimizer_accumulation", "optimizer_ema", "layer_no_numbers"),
    *("layer_regularizers", "layer_frozen", "mixed_float16"),
    "loss_scale_overflow",
]
MORE = ["optimizer_adamw", "layer_frozen", "layer_spectral_normalization"]
DRAWN = ["checkpointed_blocks"]
# The cases of each kind of strategy, by workers and devices of each.
TRAINED = {
    ("mirrored", 2, 1): EVERYWHERE + LOOKUPS + DRAWN,
    ("mirrored", 2, 2): NAMES + LOOKUPS + DRAWN,
    ("mirrored", 3, 1): EVERYWHERE,
    ("mirrored", 3, 2): EVERYWHERE,
    ("central", 2, 1): CENTRAL,
    ("central", 2, 2): CENTRAL,
    ("tpu", 2, 2): EVERYWHERE,
    ("tpu_core", 2, 2): ["batch_norm_conv_adam"],
}
if SHARDS:
    TRAINED["optimizer_state", 2, 1] = SHARDED[:5]
    TRAINED["optimizer_state", 2, 2] = SHARDED
if SHARDS_ON_DEVICES:
    TRAINED["variables", 2, 1] = SHARDED[:5]
    TRAINED["variables", 2, 2] = SHARDED
elif SHARDS:
    TRAINED["variables", 2, 1] = NAMES + MORE + DRAWN
    TRAINED["variables", 3, 1] = EVERYWHERE
MODULES = {
    "tf_data": "tensorflow",
    "torch_loader": "torch",
    "grain_map": "grain",
    "grain_iter": "grain",
}
OWN_KINDS = {"tf_data": ("tensorflow",), "torch_loader": ("torch",)}


@functools.cache
def trained(kind, workers, devices, name):
    """The outcome of a case, for each worker."""
    return clusters.run(
        jobs.train_case,
        (kind, name),
        workers=workers,
        devices=devices,
        timeout=300,
    )


def _marks(backends):
    """Of a parameter that only these backends have."""
    return [pytest.mark.runs_on(*backends)] if len(backends) < 3 else []


def marked_kinds():
    return [
        pytest.param(kind, marks=_marks(OWN_KINDS.get(kind, BACKENDS)))
        for kind in KINDS
        if kind not in MODULES or importlib.util.find_spec(MODULES[kind])
    ]


def _trained():
    for (kind, *shape), names in TRAINED.items():
        for name in names:
            assert name in jobs.CASES
            if name in CASES:
                backends = CASES[name].backends
                marks = _marks(backends if kind == "mirrored" else BACKENDS)
                yield pytest.param(kind, *shape, name, marks=marks)


@pytest.mark.parametrize(
    ("kind", "workers", "devices", "name"), list(_trained())
)
def test_same_numbers_on_every_worker(kind, workers, devices, name):
    case = CASES[name]
    for outcome in trained(kind, workers, devices, name):
        assert_same(outcome, plain(case), case.rtol)


@pytest.mark.parametrize("name", ["weighted", "two_headed"])
def test_every_worker_has_the_same_logs_to_the_last_digit(name):
    """Callbacks decide by them, on each worker alone."""
    first, *others = trained("mirrored", 2, 2, name)
    logs = [key for key in first if key.startswith(("history", "evaluate"))]
    assert logs
    for other in others:
        assert [other[key] for key in logs] == [first[key] for key in logs]


# Keras says it of every source whose length it did not know.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", marked_kinds())
def test_every_kind_of_data(kind):
    outcomes = [outcome_of(KINDS[kind], None)]
    outcomes += clusters.run(
        jobs.train_kind, (kind,), workers=2, devices=1, timeout=300
    )
    if kind.startswith("grain"):
        for outcome in outcomes:
            drop_iterations(outcome)
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])
