"""The folder of a checkpoint in parts, which all workers write and read.

A file names the folder with the parts. It is replaced when all parts of a new
checkpoint are written, so that there is always a whole one.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable
from typing import Any

from keras_dist.errors import ClusterError
from keras_dist.fit.workers.together import written_beside
from keras_dist.plugin.workers import Workers

_INDEX = "checkpoint.json"
_PREFIX = "parts-"
_PARTS = "parts"
# Seconds within which a folder of one host is seen by the others.
PATIENCE = 10.0
_PAUSE = 0.05


class CheckpointFolder:
    """A checkpoint at a path; all workers call the methods together."""

    def __init__(self, path: Any, workers: Workers | None) -> None:
        text = os.fspath(path)
        if "://" in text:
            raise ValueError(
                "A checkpoint in parts is a folder that all workers see as "
                f"local files. Received: path='{text}'. Expected: a path of "
                "a local disk, or of a network disk that is mounted."
            )
        self.path = os.path.abspath(text)
        self._index = os.path.join(self.path, _INDEX)
        self._workers = workers

    def is_shared(self, patience: float) -> bool:
        """Returns whether all workers see what the chief makes here."""
        parts, unseen = self._make_parts(patience)
        if self.is_chief:
            shutil.rmtree(parts, ignore_errors=True)
        return not unseen

    def make_parts(self) -> str:
        """Makes a new folder for the parts, and returns its path."""
        parts, unseen = self._make_parts(PATIENCE)
        if unseen:
            if self.is_chief:
                shutil.rmtree(parts, ignore_errors=True)
            raise ClusterError(
                "Workers that save a checkpoint in parts need a folder that "
                f"all of them see. Received: path='{self.path}', where "
                f"{_named(unseen)} can't see what worker 0 has made. "
                "Expected: the same path of a shared disk on each worker."
            )
        return parts

    def _make_parts(self, patience: float) -> tuple[str, list[int]]:
        """Returns the path of a new folder, and who does not see it."""
        if self._workers is not None:
            name = self._workers.chiefs_text(_PREFIX + secrets.token_hex(8))
        else:
            name = _PREFIX + secrets.token_hex(8)
        parts = os.path.join(self.path, name)
        self._by_chief(lambda: self._make(parts), f"write to '{self.path}'")
        return parts, self._workers_where(not _appears(parts, patience))

    def commit(self, parts: str, index: dict[str, Any]) -> None:
        """Makes the written parts the checkpoint, in place of the old one.

        Only the chief calls it."""
        named = {**index, _PARTS: os.path.basename(parts)}
        with written_beside(self._index) as name, open(name, "w") as file:
            json.dump(named, file, indent=1)
        self._remove_all_but(parts)

    def read(self) -> tuple[dict[str, Any], str]:
        """Returns what `commit` was given, and the path of the parts."""
        text = self._read_index()
        code = zlib.crc32(text.encode()) >> 1 if text else 0
        everyone = self._everyones(code)
        if not any(everyone):
            raise FileNotFoundError(
                "There is no checkpoint in parts, or none that was finished. "
                f"Received: path='{self.path}'. Expected: the `path` of "
                "`keras_dist.save_sharded`."
            )
        others = [i for i, each in enumerate(everyone) if each != everyone[0]]
        if others:
            raise ClusterError(
                "Workers that restore a checkpoint in parts have to read the "
                f"same one. Received: path='{self.path}', where "
                f"{_named(others)} found another checkpoint than worker 0, "
                "or none. Expected: the same path of a shared disk on each "
                "worker."
            )
        index: dict[str, Any] = json.loads(text)
        return index, os.path.join(self.path, index[_PARTS])

    def exists(self) -> bool:
        """Returns whether the chief has a whole checkpoint."""
        return bool(self._everyones(int(self._read_index() != ""))[0])

    def remove(self) -> None:
        """Removes the checkpoint, on the chief; other files stay."""
        if self.is_chief:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._index)
                self._remove_all_but("")

    @property
    def is_chief(self) -> bool:
        return self._workers is None or self._workers.cluster.is_chief

    def _make(self, parts: str) -> None:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ValueError(
                "A checkpoint in parts is a folder. Received: "
                f"path='{self.path}', which is a file. Expected: a folder, "
                "or a path where nothing is yet."
            )
        os.makedirs(parts)

    def _remove_all_but(self, parts: str) -> None:
        """Removes older parts, and what interrupted saves have left."""
        for each in os.scandir(self.path):
            if each.name.startswith(_PREFIX) and each.path != parts:
                shutil.rmtree(each.path, ignore_errors=True)

    def _read_index(self) -> str:
        """Returns the text of the index; empty without a whole checkpoint."""
        absent = FileNotFoundError, NotADirectoryError
        damaged = ValueError, LookupError, TypeError
        with contextlib.suppress(*absent, *damaged):
            with open(self._index) as file:
                text = file.read()
            parts = os.path.join(self.path, json.loads(text)[_PARTS])
            return text if os.path.isdir(parts) else ""
        return ""

    def _everyones(self, number: int) -> list[int]:
        """Returns the numbers of all workers."""
        if self._workers is None:
            return [number]
        return self._workers.concatenate_numbers([number])

    def _workers_where(self, condition: bool) -> list[int]:
        everyone = self._everyones(int(condition))
        return [index for index, found in enumerate(everyone) if found]

    def _by_chief(self, fn: Callable[[], None], what: str) -> None:
        """Calls a function on the chief; its error is one on all workers."""
        if self._workers is None:
            fn()
            return
        error: Exception | None = None
        if self.is_chief:
            try:
                fn()
            except Exception as failure:
                error = failure
        self._workers.check_all(error, what)


def _appears(folder: str, patience: float) -> bool:
    """Returns whether a folder is there; a network disk may take a while."""
    end = time.monotonic() + patience
    while not os.path.isdir(folder):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def _named(indices: list[int]) -> str:
    return ", ".join(f"worker {index}" for index in indices)
