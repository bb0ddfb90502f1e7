"""Slurm's short form of a list of hosts."""

import re
from collections.abc import Iterator

_ONE_HOST = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts_of(hostlist: str) -> Iterator[str]:
    """Yields the hosts of a form such as `n[1-2,08]`, or raises ValueError."""
    hosts = [match[0] for match in _ONE_HOST.finditer(hostlist)]
    if ",".join(hosts) != hostlist or not hosts:
        raise ValueError(hostlist)
    for host in hosts:
        yield from _names(_PARTS.findall(host))


def _names(parts: list[tuple[str, str]]) -> Iterator[str]:
    if not parts:
        yield ""
        return
    (ranges, text), *rest = parts
    for start in [text] if text else _numbers(ranges):
        for end in _names(rest):
            yield start + end


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(ranges)
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
