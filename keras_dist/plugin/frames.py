"""Frames: messages of one size with which each exchange of workers begins.

Since frames never differ in size, workers at different exchanges get each
other's, and can say so. Values that fit travel in the frame itself.
"""

import struct
from typing import NamedTuple

import numpy as np

from keras_dist.plugin.recorder import Record

# The code of the call, the bytes of the head, and those of head and body.
_FIELDS = struct.Struct("<IIQ")
_HEADER = 256
# Bytes of the words for a call, and of those for the call before it.
_WORDS, _WORDS_BEFORE = 140, _HEADER - _FIELDS.size - 140
# Bytes of a frame, and about those that one worker gets of all together.
_MOST, _LEAST, _TOGETHER = 4096, 512, 1 << 18


class Frame(NamedTuple):
    """The words of one worker at the beginning of an exchange."""

    code: int  # of this call and all before
    text: str  # the call, in words
    before: str  # the call before it
    head_size: int
    size: int  # of head and body
    content: bytes  # head and body, the head, or nothing: what fits


def frame_size(num_workers: int) -> int:
    """Returns the bytes of a frame: with many workers, frames are smaller."""
    fair = _TOGETHER // num_workers // 4 * 4
    return max(_LEAST, min(_MOST, fair))


def room(size: int) -> int:
    """Returns the bytes that fit into a frame of a size."""
    return size - _HEADER


def packed(
    size: int, entry: Record, before: str, head: bytes, body: bytes, total: int
) -> np.ndarray:
    """Returns a frame as an array of bytes; the total may be of more bytes."""
    frame = np.zeros(size, np.uint8)
    fields = _FIELDS.pack(entry.code, len(head), total)
    words = _filled(entry.text, _WORDS) + _filled(before, _WORDS_BEFORE)
    content = head + body if len(head) <= room(size) else b""
    data = fields + words + content
    frame[: len(data)] = np.frombuffer(data, np.uint8)
    return frame


def unpacked(row: np.ndarray) -> Frame:
    """Returns what a worker said with a frame."""
    data = row.tobytes()
    code, head_size, size = _FIELDS.unpack_from(data)
    end = _FIELDS.size + _WORDS
    text, before = _words(data[_FIELDS.size : end]), _words(data[end:_HEADER])
    return Frame(code, text, before, head_size, size, data[_HEADER:])


def _filled(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


def _words(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
