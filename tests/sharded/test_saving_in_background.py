"""Training goes on while `save_sharded(wait=False)` writes."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

import keras_dist
from keras_dist.fit.workers.checkpoint_folder import CheckpointFolder
from keras_dist.fit.workers.saving import Saving
from parity.harness import assert_same
from sharded import saving_script
from sharded.helpers import PLACES
from sharded.helpers import assert_equal
from sharded.helpers import assert_saved
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import saves
from sharded.helpers import shards
from sharded.helpers import state_of
from sharded.helpers import trained

pytestmark = [saves, pytest.mark.usefixtures("all_are_large")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


@pytest.fixture
def commit(monkeypatch):
    """Replaces what makes the written parts the checkpoint.

    A function that takes a callable, which is called before.
    """
    original = CheckpointFolder.commit

    def replace(fn):
        def call(*args):
            fn()
            original(*args)

        monkeypatch.setattr(CheckpointFolder, "commit", call)

    return replace


def fail():
    raise OSError("no space left")


@pytest.mark.parametrize(
    "place",
    [
        "plain",
        "mirrored_2",
        pytest.param("sharded_2", marks=shards),
        pytest.param("variables_2", marks=shards),
    ],
)
def test_the_values_are_those_at_the_call(place, path, monkeypatch):
    may_write, run = threading.Event(), Saving.run
    monkeypatch.setattr(
        Saving, "run", lambda *args: (may_write.wait(), run(*args))
    )
    model = trained(place)
    before = state_of(model)
    saving = keras_dist.save_sharded(model, path, wait=False)
    assert isinstance(saving, futures.Future)
    fit(model)
    assert not saving.done()
    may_write.set()
    saving.result()
    assert saving.done()
    again = compiled(*PLACES[place])
    keras_dist.restore_sharded(again, path)
    assert_equal(state_of(again), before)
    fit(again)
    assert_same(state_of(again), state_of(model))


def test_the_older_one_is_there_until_the_new_one_is(path, tmp_path, commit):
    model = trained("mirrored_2")
    keras_dist.save_sharded(model, path)
    before = state_of(model)
    fit(model)
    is_written, may_end = threading.Event(), threading.Event()
    commit(lambda: (is_written.set(), may_end.wait()))
    saving = keras_dist.save_sharded(model, path, wait=False)
    after = state_of(model)
    fit(model)
    is_written.wait()
    shutil.copytree(path, tmp_path / "copy")
    assert not saving.done()
    may_end.set()
    # It waits for the saving.
    assert_saved(path, after)
    assert_saved(tmp_path / "copy", before)
    assert len(list(path.iterdir())) == 2


@pytest.mark.parametrize("by", ["result", "save_sharded", "restore_sharded"])
def test_an_error_is_raised_once(by, path, monkeypatch, commit):
    model = trained("mirrored_2")
    keras_dist.save_sharded(model, path)
    before = state_of(model)
    fit(model)
    commit(fail)
    saving = keras_dist.save_sharded(model, path, wait=False)
    futures.wait([saving])
    with pytest.raises(OSError, match="no space left") as raised:
        if by == "result":
            saving.result()
        else:
            getattr(keras_dist, by)(model, path)
    assert f"path='{path}'" in str(raised.value)
    monkeypatch.undo()
    assert_saved(path, before)
    keras_dist.save_sharded(model, path)
    assert_saved(path, state_of(model))


def script(path, way):
    return subprocess.Popen(
        [sys.executable, saving_script.__file__, str(path), way],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
    )


def saved_number(path):
    model = saving_script.make_model()
    keras_dist.restore_sharded(model, path)
    (number,) = {float(v) for each in model.get_weights() for v in each.flat}
    return number


@pytest.mark.parametrize("way", ["once", "fails"])
def test_the_end_of_a_program_waits(way, path):
    """And prints an error."""
    with script(path, way) as process:
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    if way == "once":
        assert saved_number(path) == 1
        return
    assert "save_sharded(wait=False) failed" in errors
    assert f"path='{path}'" in errors
    assert "no space left" in errors


@pytest.mark.parametrize(
    ("way", "kind", "delay"),
    [
        ("background", signal.SIGINT, 0.0),
        ("background", signal.SIGKILL, 0.0),
        ("foreground", signal.SIGKILL, 0.01),
        ("foreground", signal.SIGKILL, 0.05),
    ],
)
def test_stopped_at_any_time(way, kind, delay, path):
    with script(path, way) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        time.sleep(delay)
        os.kill(process.pid, kind)
        lines += process.stdout.readlines()
        errors = process.stderr.read()
    assert kind is signal.SIGKILL or "KeyboardInterrupt" in errors
    number = int(lines[-1])
    assert saved_number(path) in {number, number + 1}
