"""Files that are whole or absent, whatever ends the process or the machine."""

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
    """The name of a file to write, which then takes the place of another.

    A process that is killed leaves the old file or the new one, and so does a
    machine that loses its power: the new one is on the disk before it takes
    the place, and the folder's entry is once this is over.

    Args:
        path: String, a local file.
    """
    folder, name = os.path.split(path)
    # The suffix says how Keras writes it. Always the same name: what a killed
    # process has left is written over.
    beside = os.path.join(folder, f".unfinished-{name}")
    try:
        yield beside
        _to_disk(beside)
        os.replace(beside, path)
        # Some file systems over a network don't do it to folders.
        with contextlib.suppress(OSError):
            _to_disk(folder or os.curdir)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


def seal(path: str) -> None:
    """Adds a checksum of a file to its end, where HDF5 does not look.

    Args:
        path: String, a local file.
    """
    with open(path, "r+b") as file:
        digest = _digest(file, os.path.getsize(path))
        file.seek(0, os.SEEK_END)
        file.write(_MARK + digest)


def is_damaged(path: str) -> bool:
    """Whether a sealed file is not what it was; one without a seal is not.

    Args:
        path: String, a local file.
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
