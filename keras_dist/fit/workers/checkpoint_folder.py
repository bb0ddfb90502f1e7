"""The folder of a sharded checkpoint, which all workers write and read.

A file names the folder with the parts. It is replaced when all parts of a new
checkpoint are written, so that there is always a whole one. Whatever else is
in the folder is the user's.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from typing import Any

from keras_dist.errors import CheckpointError
from keras_dist.errors import ClusterError
from keras_dist.fit.workers.sync import UNFINISHED
from keras_dist.fit.workers.sync import written_beside
from keras_dist.plugin.workers import Workers

_INDEX = "checkpoint.json"
_PARTS = "parts"
_NAME = re.compile(r"parts-[0-9a-f]{16}")
# Seconds within which a folder of one host is seen by the others.
PATIENCE = 10.0
_PAUSE = 0.05
# How often a checkpoint may be replaced while it is read.
_MOST_READS = 100


class CheckpointFolder:
    """A checkpoint at a path; all workers call the methods together."""

    def __init__(self, path: Any, workers: Workers | None) -> None:
        text = os.fspath(path)
        if "://" in text:
            raise ValueError(
                f"A checkpoint has local files. Received: path='{text}'. "
                "Expected: a path of a local disk, or of a network disk that "
                "is mounted."
            )
        self.path = os.path.abspath(text)
        self._index = os.path.join(self.path, _INDEX)
        self._workers = workers
        self.is_chief = workers is None or workers.cluster.is_chief

    def is_shared(self, patience: float) -> bool:
        """Returns whether all workers see what the chief makes here."""
        parts, unseen = self._make_parts(patience)
        self._abandon(parts)
        return not unseen

    def make_parts(self) -> str:
        """Makes a new folder for the parts, and returns its path."""
        parts, unseen = self._make_parts(PATIENCE)
        if unseen:
            self._abandon(parts)
            raise ClusterError(
                "Workers that save a checkpoint in parts need a folder that "
                f"all of them see. Received: path='{self.path}', where "
                f"{_named(unseen)} can't see what worker 0 has made. "
                "Expected: the same path of a shared disk on each worker."
            )
        return parts

    def _make_parts(self, patience: float) -> tuple[str, list[int]]:
        """Returns the path of a new folder, and who does not see it."""
        name = f"{UNFINISHED}parts-{secrets.token_hex(8)}"
        if self._workers is not None:
            name = self._workers.chiefs_text(name)
        parts = os.path.join(self.path, name)
        error: Exception | None = None
        try:
            if self.is_chief:
                self._make(parts)
        except Exception as failure:
            error = failure
        self.check_all(error, f"write to '{self.path}'")
        return parts, self._workers_where(not _appears(parts, patience))

    def _abandon(self, parts: str) -> None:
        if self.is_chief:
            shutil.rmtree(parts, ignore_errors=True)

    def commit(self, parts: str, index: dict[str, Any]) -> None:
        """Makes the written parts the checkpoint, in place of the old one.

        Only the chief calls it."""
        older = _parts_of(self._text())
        name = os.path.basename(parts).removeprefix(UNFINISHED)
        whole = os.path.join(self.path, name)
        os.rename(parts, whole)
        try:
            with (
                written_beside(self._index) as beside,
                open(beside, "w") as file,
            ):
                json.dump({**index, _PARTS: name}, file, indent=1)
        except BaseException:
            # An interrupt may come when the index is there already.
            if _parts_of(self._text()) != name:
                os.rename(whole, parts)
            raise
        self._remove(older)

    def read(
        self, restore: Callable[[dict[str, Any], str], None]
    ) -> dict[str, Any]:
        """Passes the index and the path of the parts to a function.

        If the checkpoint has been replaced meanwhile, what was read may be
        parts of it, or none, and the function is called with the new one.
        Returns the index.
        """
        for _ in range(_MOST_READS):
            text = self._chiefs_index()
            index: dict[str, Any] = json.loads(text)
            parts = os.path.join(self.path, index[_PARTS])
            unseen = self._workers_where(not self._sees(parts, text))
            error: Exception | None = None
            try:
                if unseen:
                    raise self._seen_by_some(unseen)
                restore(index, parts)
            except Exception as failure:
                error = failure
            was_replaced = self._everyones(int(self._whole_index() != text))[0]
            if not was_replaced:
                self.check_all(error, f"read '{self.path}'")
                return index
        raise CheckpointError(
            f"The checkpoint '{self.path}' was replaced {_MOST_READS} times "
            "while it was read. Received: saves that take less time than "
            "reading. Expected: some time between saves to one path."
        )

    def exists(self) -> bool:
        """Returns whether the chief has a whole checkpoint."""
        return bool(self._everyones(int(self._whole_index() != ""))[0])

    def remove(self) -> None:
        """Removes the checkpoint, on the chief; other files stay."""
        parts = _parts_of(self._text()) if self.is_chief else ""
        if parts:
            os.remove(self._index)
            self._remove(parts)

    def check_all(self, error: Exception | None, what: str) -> None:
        """Raises the error of this worker, or one for that of another."""
        if self._workers is not None:
            self._workers.check_all(error, what)
        elif error is not None:
            raise error

    def _make(self, parts: str) -> None:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ValueError(
                "A checkpoint in parts is a folder. Received: "
                f"path='{self.path}', which is a file. Expected: a folder, "
                "or a path where nothing is yet."
            )
        if os.path.lexists(self._index) and not _parts_of(self._text()):
            raise ValueError(
                "A checkpoint in parts can't replace a file that it did not "
                f"write.\nReceived: path='{self.path}', with a file "
                f"'{_INDEX}' that is not one of `keras_dist.save_sharded`, or "
                "is damaged. Expected: another folder. Or remove this file."
            )
        try:
            os.makedirs(parts)
        except OSError as error:
            raise CheckpointError(
                "No checkpoint can be written here. Received: "
                f"path='{self.path}' ({error}). Expected: a folder that can "
                "be written."
            ) from error

    def _remove(self, parts: str) -> None:
        """Removes older parts, and what interrupted saves have left."""
        names = [name for name in os.listdir(self.path) if _is_unfinished(name)]
        for name in filter(None, [parts, *names]):
            # It refuses a link, so that what a user has moved away stays.
            shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def _chiefs_index(self) -> str:
        """Returns the text of the chief's index, on all workers."""
        text = self._whole_index()
        owners = self._workers_where(text != "")
        if not owners:
            raise FileNotFoundError(
                "There is no checkpoint in parts, or none that was finished. "
                f"Received: path='{self.path}'. Expected: the `path` of "
                "`keras_dist.save_sharded`."
            )
        if self._workers is not None:
            text = self._workers.chiefs_text(text)
        if not text:
            raise self._seen_by_some(owners)
        return text

    def _sees(self, parts: str, text: str) -> bool:
        """Returns whether the parts of the chief's index are here, too."""
        if self._workers is None:
            return True
        return _appears(
            parts, PATIENCE, lambda: self._whole_index() not in ("", text)
        )

    def _seen_by_some(self, others: list[int]) -> ClusterError:
        return ClusterError(
            "Workers that restore a checkpoint in parts have to read the "
            f"same one. Received: path='{self.path}', where "
            f"{_named(others)} found another checkpoint than worker 0, "
            "or none. Expected: the same path of a shared disk on each "
            "worker."
        )

    def _whole_index(self) -> str:
        """Returns the text of the index; empty without a whole checkpoint."""
        text = ""
        # Between two looks, another checkpoint may have taken its place.
        while (newest := self._text()) != text:
            text, parts = newest, _parts_of(newest)
            if parts and os.path.isdir(os.path.join(self.path, parts)):
                return text
        return ""

    def _text(self) -> str:
        """Returns the text of the file in the index' place."""
        absent = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with absent, open(self._index, errors="replace") as file:
            return file.read()
        return ""

    def _everyones(self, number: int) -> list[int]:
        """Returns the numbers of all workers."""
        if self._workers is None:
            return [number]
        return self._workers.concatenate_numbers([number])

    def _workers_where(self, condition: bool) -> list[int]:
        everyone = self._everyones(int(condition))
        return [index for index, flag in enumerate(everyone) if flag]


def _parts_of(text: str) -> str:
    """Returns the name of the parts in an index of ours, empty for others."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        name = json.loads(text)[_PARTS]
        if _NAME.fullmatch(name):
            return str(name)
    return ""


def _is_unfinished(name: str) -> bool:
    is_one = name.startswith(UNFINISHED)
    return is_one and bool(_NAME.fullmatch(name.removeprefix(UNFINISHED)))


def _appears(
    folder: str, patience: float, is_gone: Callable[[], bool] = lambda: False
) -> bool:
    """Returns whether a folder is there; a network disk may take a while."""
    end = time.monotonic() + patience
    while not os.path.isdir(folder):
        if is_gone() or time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def _named(indices: list[int]) -> str:
    return ", ".join(f"worker {index}" for index in indices)
