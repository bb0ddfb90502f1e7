"""Files that are complete or absent, even if the process or machine dies."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import BinaryIO

_MARK = b"keras_dist sealed "
_SIZE = len(_MARK) + hashlib.sha256().digest_size
_CHUNK = 1 << 20


@contextlib.contextmanager
def written_beside(path: str) -> Iterator[str]:
    """Yields the name of a file to write, which then replaces a local file.

    A process that is killed leaves the old file or the new one. So does a power
    failure: the new file is on the disk before it replaces the old one, and the
    folder's entry is on the disk when the context ends.
    """
    folder, name = os.path.split(path)
    # Keras chooses the format by the suffix. The name is always the same, so
    # that a file that a killed process has left is overwritten.
    beside = os.path.join(folder, f".unfinished-{name}")
    try:
        yield beside
        _to_disk(beside)
        os.replace(beside, path)
        # Some network file systems can't do this for folders.
        with contextlib.suppress(OSError):
            _to_disk(folder or os.curdir)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


def seal(path: str) -> None:
    """Adds a checksum to the end of a local file, which HDF5 does not read."""
    with open(path, "r+b") as file:
        digest = _digest(file, os.path.getsize(path))
        file.seek(0, os.SEEK_END)
        file.write(_MARK + digest)


def is_damaged(path: str) -> bool:
    """Returns whether a local file's content differs from its checksum.

    A file without a checksum is not damaged.
    """
    size = os.path.getsize(path) - _SIZE
    if size < 0:
        return False
    with open(path, "rb") as file:
        digest = _digest(file, size)
        end = file.read()
    return end.startswith(_MARK) and end != _MARK + digest


def _digest(file: BinaryIO, size: int) -> bytes:
    found = hashlib.sha256()
    while size > 0:
        data = file.read(min(size, _CHUNK))
        if not data:
            break
        found.update(data)
        size -= len(data)
    return found.digest()


def _to_disk(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
