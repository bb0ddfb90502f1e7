"""`fit` and its relatives on several workers give one device's numbers."""

import functools
import importlib.util

import pytest

from parity import cases
from parity.harness import BACKEND
from parity.harness import BACKENDS
from parity.harness import assert_same
from parity.harness import drop_iterations
from parity.harness import plain
from parity.kinds import KINDS
from parity.kinds import outcome_of
from workers import clusters
from workers import jobs

# On 2 workers of 2 devices; of these, EVERYWHERE on all other shapes too.
NAMES = [
    "weighted",
    "batch_norm_conv_adam",
    "mask_gru",
    "two_headed",
    "even",
    "one",
    "fewer_than_replicas",
    "last_of_one_batch_norm",
    "optimizer_global_clipnorm",
    "optimizer_accumulation",
    "optimizer_ema",
    "loss_sum",
    "loss_mean_with_sample_weight",
    "loss_dice",
    "mask_of_the_loss",
    "layer_add_loss",
    "layer_regularizers",
    "layer_sums_over_rows",
    "layer_no_numbers",
    "loss_own_call",
    "layer_own_compute_loss",
    "steps_per_execution",
    "mixed_float16",
]
EVERYWHERE = ["weighted", "batch_norm_conv_adam", "fewer_than_replicas"]
SHAPES = [(2, 1), (2, 2), (3, 1), (3, 2)]
BY_NAME = {case.name: case for case in cases.CASES if BACKEND in case.backends}
MODULES = {
    "tf_data": "tensorflow",
    "torch_loader": "torch",
    "grain_map": "grain",
    "grain_iter": "grain",
}
OWN_KINDS = {"tf_data": ("tensorflow",), "torch_loader": ("torch",)}


def _names(shape):
    chosen = NAMES if shape == (2, 2) else EVERYWHERE
    return [name for name in chosen if name in BY_NAME]


@functools.cache
def trained(shape, name):
    """The outcome of a case, for each worker."""
    workers, devices = shape
    return clusters.run(
        jobs.train_case,
        (name,),
        workers=workers,
        devices=devices,
        timeout=300,
    )


def _kinds():
    return [
        name
        for name in KINDS
        if name not in MODULES or importlib.util.find_spec(MODULES[name])
    ]


def _marks(backends):
    """Of a parameter that only these backends have."""
    return [pytest.mark.runs_on(*backends)] if len(backends) < 3 else []


def marked_kinds():
    return [
        pytest.param(kind, marks=_marks(OWN_KINDS.get(kind, BACKENDS)))
        for kind in _kinds()
    ]


def test_the_names_are_cases():
    assert set(NAMES) <= {case.name for case in cases.CASES}


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param(shape, name, marks=_marks(BY_NAME[name].backends))
        for shape in SHAPES
        for name in _names(shape)
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "x".join(map(str, value))
    ),
)
def test_same_numbers_on_every_worker(shape, name):
    case = BY_NAME[name]
    for outcome in trained(shape, name):
        assert_same(outcome, plain(case), case.rtol)


@pytest.mark.parametrize("name", ["weighted", "two_headed"])
def test_every_worker_has_the_same_logs_to_the_last_digit(name):
    """Callbacks decide by them, on each worker alone."""
    first, *others = trained((2, 2), name)
    logs = [key for key in first if key.startswith(("history", "evaluate"))]
    assert logs
    for other in others:
        assert [other[key] for key in logs] == [first[key] for key in logs]


# Keras says it of every source whose length it did not know.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", marked_kinds())
def test_every_kind_of_data(kind):
    expected = outcome_of(KINDS[kind], None)
    if kind.startswith("grain"):
        drop_iterations(expected)
    found = clusters.run(
        jobs.train_kind, (kind,), workers=2, devices=1, timeout=300
    )
    for outcome in found:
        if kind.startswith("grain"):
            drop_iterations(outcome)
        assert_same(outcome, expected)
