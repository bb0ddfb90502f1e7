"""Models with several optimizers, whose workers are stopped and start again."""

import functools

import keras
import pytest

from parity import gans
from parity.harness import assert_same
from sharded.helpers import SHARDS
from workers import clusters
from workers import gan_jobs as jobs

BACKEND = keras.backend.backend()
# What is sharded, where the model keeps its optimizers, and how it came to the
# strategy.
CASES = [("mirrored", kind, "in_scope") for kind in gans.KINDS]
CASES += [("mirrored", "nested", "adopted")]
if SHARDS:
    CASES += [
        ("optimizer_state", "dict", "in_scope"),
        ("optimizer_state", "scaled", "adopted"),
        ("variables", "dict", "in_scope"),
    ]
SHARDED = [case[:2] for case in CASES if case[0] != "mirrored"]
lazily = pytest.mark.only_on(
    "tensorflow", "torch", reason="On JAX, a step can't make variables."
)
saves_parts = pytest.mark.only_on(
    "jax", "torch", reason="TensorFlow shards nothing, and refuses it."
)


def launched(job, *args):
    return clusters.run(
        getattr(jobs, job), args, workers=2, devices=1, timeout=300
    )


@functools.cache
def whole(kind):
    """The state after a training that nothing has stopped."""
    first, second = launched("whole", "mirrored", kind)
    assert_same(second, first, rtol=0, atol=0)
    return first


@pytest.mark.parametrize(("what", "kind", "way"), CASES)
def test_a_backup_has_all_optimizers(what, kind, way, tmp_path):
    folder = str(tmp_path / "backup")
    for found in launched("restart", what, kind, folder, True, way):
        assert_same(found, whole(kind))


@lazily
@pytest.mark.parametrize("kind", ["dict", "parts"])
def test_optimizers_that_the_first_step_builds(kind, tmp_path):
    folder = str(tmp_path / "backup")
    for found in launched("restart", "mirrored", kind, folder, False):
        assert_same(found, whole(kind))


@pytest.mark.parametrize(
    ("what", "kind"), [("mirrored", "nested"), *SHARDED[:1]]
)
def test_all_optimizers_go_on_after_sigterm(what, kind, tmp_path):
    for found, ends in launched("preempted", what, kind, str(tmp_path)):
        assert ends == 1
        assert_same(found, whole(kind))


@saves_parts
@pytest.mark.parametrize(("what", "kind"), [*SHARDED, ("mirrored", "list")])
def test_each_way_of_saving_has_all_optimizers(what, kind, tmp_path):
    (state, parts), (other, _) = launched("saved", what, kind, str(tmp_path))
    assert_same(other, state, rtol=0, atol=0)
    assert_same(parts, state, rtol=0, atol=0)
    for name in ("own.weights.h5", "whole.keras"):
        plain = gans.made(kind)
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(tmp_path / name)
        assert_same(gans.state_of(plain), state, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["mirrored", "variables"][: 1 + SHARDS])
def test_an_optimizer_that_can_not_be_found(what, tmp_path):
    for error in launched("kept_apart", what, str(tmp_path / "backup")):
        assert "Optimizer 'adam" in error
        assert "in a set or behind a property" in error
