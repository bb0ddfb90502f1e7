"""Readable forms of numbers and names."""

import re
from collections.abc import Iterable

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([a-z]?)", re.IGNORECASE)
_MOST = 1e18
_NAME = re.compile(r"(.*\D)(\d+)")


def bytes_text(num_bytes: int) -> str:
    """Returns bytes with about three digits, in powers of 1,000.

    Example:

    >>> bytes_text(14_000_000_000)
    '14.0 GB'
    """
    number, unit = float(num_bytes), 0
    while number >= 999.95 and unit < len(_UNITS) - 1:
        number, unit = number / 1e3, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def read_number(text: str) -> int:
    """Reads a count as people write it: `7e9`, `7B`, `350M`, `20_000`.

    Raises:
        ValueError: If the text is no number from 1 to 1e18.
    """
    match = _NUMBER.fullmatch(text.strip().replace("_", "").replace(",", ""))
    suffix = match[2].lower() if match else ""
    number = 0.0
    if match and suffix in _SUFFIXES:
        number = float(match[1]) * _SUFFIXES[suffix]
    if not 1 <= number <= _MOST:
        raise ValueError(
            f"A number from 1 to 1e18 could not be read. Received: {text!r}. "
            "Expected: digits, such as 350000, 7e9, or with k, M, B or T, "
            "such as 7B."
        )
    return round(number)


def names_text(names: Iterable[str]) -> str:
    """Joins names; numbers that follow each other become a range: `cpu:0-3`.

    Example:

    >>> names_text(["cpu:0", "cpu:1", "cpu:2", "gpu:0"])
    'cpu:0-2 gpu:0'
    """
    runs: list[tuple[str, int, int]] = []
    parts: list[str] = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            parts.append(name)
            runs.append((name, -1, -1))
            continue
        stem, number = match[1], int(match[2])
        if runs and runs[-1][0] == stem and runs[-1][2] == number - 1:
            runs[-1] = (stem, runs[-1][1], number)
            parts[-1] = f"{stem}{runs[-1][1]}-{number}"
        else:
            runs.append((stem, number, number))
            parts.append(name)
    return " ".join(parts)
