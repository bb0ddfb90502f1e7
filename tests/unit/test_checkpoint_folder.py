"""A commit of parts that fails, before and after the index is there."""

import os

import pytest

from keras_dist.fit.workers import checkpoint_folder
from keras_dist.fit.workers.checkpoint_folder import CheckpointFolder
from keras_dist.fit.workers.sync import UNFINISHED

OLD, NEW = "parts-" + "0" * 16, "parts-" + "1" * 16


@pytest.fixture
def folder(tmp_path):
    """One with a checkpoint, and with parts that are written but not one."""
    (tmp_path / f"{UNFINISHED}{OLD}").mkdir()
    made = CheckpointFolder(tmp_path, None)
    made.commit(str(tmp_path / f"{UNFINISHED}{OLD}"), {})
    (tmp_path / f"{UNFINISHED}{NEW}").mkdir()
    return made


def test_the_older_one_stays_if_the_index_can_not_be_written(
    folder, monkeypatch
):
    def full(*args, **kwargs):
        raise OSError("no space left on device")

    before = folder._text()
    monkeypatch.setattr(checkpoint_folder.json, "dump", full)
    parts = os.path.join(folder.path, f"{UNFINISHED}{NEW}")
    with pytest.raises(OSError, match="no space"):
        folder.commit(parts, {})
    assert folder._text() == before
    names = sorted(os.listdir(folder.path))
    assert names == [f"{UNFINISHED}{NEW}", "checkpoint.json", OLD]


def test_the_new_one_stays_if_the_index_is_there(folder, monkeypatch):
    def interrupted(source, target):
        os.rename(source, target)
        raise KeyboardInterrupt

    together = "keras_dist.fit.workers.sync.os.replace"
    monkeypatch.setattr(together, interrupted)
    parts = os.path.join(folder.path, f"{UNFINISHED}{NEW}")
    with pytest.raises(KeyboardInterrupt):
        folder.commit(parts, {})
    assert NEW in folder._text()
    assert os.path.isdir(os.path.join(folder.path, NEW))
