"""Checkpoints that some workers save, and other numbers of workers restore."""

import functools
import json
import pathlib
import tempfile

import keras
import pytest

import keras_dist
from parity.harness import assert_same
from parity.harness import sharded_variables
from sharded.helpers import SHARDS_ON_DEVICES
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import mirrored
from sharded.helpers import sharded
from sharded.helpers import state_of
from workers import clusters
from workers import sharded_checkpoints_jobs as jobs

pytestmark = [
    pytest.mark.only_on(
        "jax", "torch", reason="TensorFlow shards nothing, and refuses it."
    ),
    pytest.mark.usefixtures("all_are_large"),
]
WHAT = ["variables", "optimizer_state", "mirrored"]
# Workers that save, and that restore: what they shard, their number, and each
# one's devices.
TWO, THREE = ("variables", 2, 1), ("variables", 3, 1)
WAYS = [
    (TWO, TWO),
    (TWO, THREE),
    (THREE, TWO),
    (TWO, ("mirrored", 2, 1)),
    (("optimizer_state", 2, 1), TWO),
    (("mirrored", 2, 1), ("optimizer_state", 3, 1)),
]
if keras.backend.backend() == "jax":
    WAYS += [(("variables", 2, 2), TWO), (TWO, ("variables", 2, 2))]


def launched(job, kind, path, *args):
    what, workers, devices = kind
    return clusters.run(
        getattr(jobs, job),
        (what, str(path), *args),
        workers=workers,
        devices=devices,
        timeout=300,
    )


@functools.cache
def saved(kind):
    """The path of a checkpoint, and the state at the end of training."""
    path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    return path, launched("save", kind, path)[0]


@pytest.mark.parametrize(("saving", "restoring"), WAYS)
def test_another_number_of_workers_goes_on(saving, restoring):
    path, expected = saved(saving)
    plain = compiled(None)
    keras_dist.restore_sharded(plain, path)
    for restored, end in launched("restore", restoring, path):
        assert_same(restored, state_of(plain), rtol=0, atol=0)
        assert_same(end, expected)


@pytest.mark.parametrize("kind", [TWO, ("optimizer_state", 2, 1)])
def test_one_process_goes_on(kind):
    path, expected = saved(kind)
    ways = [(None, None)]
    if SHARDS_ON_DEVICES:
        ways += [(3, sharded), (3, sharded_variables)]
    for place in ways:
        model = compiled(*place)
        keras_dist.restore_sharded(model, path)
        fit(model, initial_epoch=2, epochs=4)
        assert_same(state_of(model), expected)


def test_workers_go_on_from_one_process(tmp_path):
    path = tmp_path / "checkpoint"
    model = compiled(None)
    fit(model)
    keras_dist.save_sharded(model, path)
    for restored, _ in launched("restore", TWO, path):
        assert_same(restored, state_of(model), rtol=0, atol=0)


def test_each_worker_writes_its_parts():
    path, _ = saved(TWO)
    (parts,) = path.glob("parts-*")
    if keras.backend.backend() == "jax":
        folders = sorted(parts.glob("arrays/ocdbt.process_*"))
        sizes = [
            sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            for folder in folders
        ]
    else:
        sizes = [each.stat().st_size for each in parts.glob("*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0


@pytest.mark.parametrize("what", WHAT)
def test_an_older_one_is_replaced(what, tmp_path):
    path = tmp_path / "checkpoint"
    states = launched("save_again", (what, 2, 1), path)
    assert len(list(path.iterdir())) == 2
    assert json.loads((path / "checkpoint.json").read_text())
    model = compiled(None)
    keras_dist.restore_sharded(model, path)
    for state in states:
        assert_same(state_of(model), state, rtol=0, atol=0)


def test_workers_without_a_shared_folder(tmp_path):
    found = launched("other_paths", TWO, tmp_path)
    for saving, restoring, nowhere, same, left in found:
        assert saving.startswith("ClusterError: ")
        assert "worker 1 can't see" in saving
        assert restoring.startswith("ClusterError: ")
        assert "worker 1 found another" in restoring
        assert nowhere.startswith("FileNotFoundError: ")
        assert same
        assert left == []


@pytest.mark.parametrize("what", WHAT[:1])
def test_a_chief_that_can_not_write(what, tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    chief, other = launched("unwritable", (what, 2, 1), path)
    assert chief.startswith("ValueError: ")
    assert other.startswith("ClusterError: Worker 0 could not")


@pytest.mark.parametrize("kind", [TWO, ("mirrored", 2, 1)])
def test_workers_train_while_they_save(kind, tmp_path):
    path = tmp_path / "checkpoint"
    expected = launched("save", kind, path, False)[0]
    for _, end in launched("restore", TWO, path):
        assert_same(end, expected)


@pytest.mark.parametrize("wait", [True, False])
def test_a_worker_that_can_not_write(wait, tmp_path):
    path = tmp_path / "checkpoint"
    (chief, before), (other, _) = launched("fail", TWO, path, wait)
    assert other.startswith("CheckpointError: ")
    assert "(FileExistsError: " in other
    assert chief.startswith("ClusterError: Worker 1 could not write its parts")
    model = compiled(None)
    keras_dist.restore_sharded(model, path)
    assert_same(state_of(model), before, rtol=0, atol=0)


BACKUPS = [
    (TWO, THREE, "epoch"),
    (TWO, TWO, 1),
    (TWO, ("mirrored", 2, 1), "epoch"),
    (("mirrored", 2, 1), TWO, "epoch"),
]


@pytest.mark.parametrize(("saving", "restoring", "frequency"), BACKUPS)
def test_a_backup_in_parts(saving, restoring, frequency, tmp_path):
    path = str(tmp_path / "backup")
    files = launched("back_up", saving, path, frequency, 2, 1)
    has_parts = "checkpoint.json" in files[0]
    assert has_parts == (saving[0] == "variables")
    assert has_parts != ("latest.weights.h5" in files[0])
    whole = compiled(None)
    fit(whole, epochs=4)
    for end in launched("go_on", restoring, path, frequency):
        assert_same(end, state_of(whole))


def test_one_process_does_not_begin_again(tmp_path):
    path = str(tmp_path / "backup")
    launched("back_up", TWO, path, "epoch", 2, 1)
    model = compiled(2, sharded if SHARDS_ON_DEVICES else mirrored)
    backup = keras.callbacks.BackupAndRestore(path)
    with pytest.raises(ValueError, match="keras_dist.restore_sharded"):
        fit(model, epochs=4, callbacks=[backup])
    keras_dist.restore_sharded(model, path)
    fit(model, initial_epoch=2, epochs=4)
    whole = compiled(None)
    fit(whole, epochs=4)
    assert_same(state_of(model), state_of(whole))


def test_the_kind_of_a_backup_may_change(tmp_path):
    path = str(tmp_path / "backup")
    launched("back_up", ("mirrored", 2, 1), path, "epoch", 1, 1)
    files = launched("back_up", TWO, path, "epoch", 2, 1)[0]
    assert [name[:6] for name in files] == ["checkp", "parts-"]
    files = launched("back_up", ("mirrored", 2, 1), path, "epoch", 3, 1)[0]
    assert files == ["latest.weights.h5", "training_metadata.json"]
    whole = compiled(None)
    fit(whole, epochs=4)
    for end in launched("go_on", TWO, path, "epoch"):
        assert_same(end, state_of(whole))


@pytest.mark.parametrize("what", ["variables", "mirrored"])
def test_workers_that_have_to_end(what, tmp_path):
    """They save in parts what is in parts, and the chief saves the rest."""
    for saved, restored in launched("preempt", (what, 2, 1), tmp_path):
        assert_same(restored, saved, rtol=0, atol=0)
    sharded = (tmp_path / "preemption" / "checkpoint.json").exists()
    assert sharded == (what == "variables")
    assert sharded != (tmp_path / "preemption.weights.h5").exists()
