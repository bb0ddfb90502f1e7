"""Reads the text of a compiled program: its collectives, its talk to a host."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

from keras_dist.plugins import Collective

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^ ]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[^ ]+ = (.*?) ([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)="
    r"%?([\w.\-]+)|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_CHAIN = re.compile(r'chain_id="(\d+)"')
_SCATTERS = "all-reduce-scatter"
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r" constant\((\d+)\)")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
# Groups of devices: listed, counted, or the axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+(?:,\d+)*)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_NAME = re.compile(r"'([^']+)'")
_BITS = re.compile(r"(\d+)")
_HOST = ("infeed", "outfeed")
_CALLBACK = re.compile(r'custom_call_target="[^"]*callback[^"]*"')


@dataclasses.dataclass(frozen=True)
class _Line:
    """One instruction: its results' type, its operation, and its text."""

    result: str
    operation: str
    text: str


def collectives_in(text: str, devices: int) -> tuple[Collective, ...]:
    """Returns a program's collectives, those in loops as often as they run."""
    counts: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    for line, times in _executed(text):
        kind = line.operation.removesuffix("-start")
        if kind not in _KINDS:
            continue
        size = _group_size(line.text, devices)
        if size == 1:
            continue
        key = kind, size
        counts[key] += times
        sizes[key] += times * _whole_bytes(line, kind, size)
    return tuple(
        Collective(
            kind,
            size,
            count,
            sizes[kind, size],
            sent(kind, size, sizes[kind, size]),
        )
        for (kind, size), count in sorted(counts.items())
    )


def host_transfers_in(text: str) -> int:
    """Returns how many times a program exchanges values with the host."""
    return sum(
        times
        for line, times in _executed(text)
        if line.operation in _HOST
        or (
            line.operation in ("send", "recv")
            and "is_host_transfer=true" in line.text
        )
        or (line.operation == "custom-call" and _CALLBACK.search(line.text))
    )


def sent(kind: str, devices: int, num_bytes: int) -> int:
    """Returns the bytes that a device sends around a ring."""
    if kind in ("collective-permute", "collective-broadcast"):
        return num_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (devices - 1) * num_bytes // devices


def _executed(text: str) -> Iterator[tuple[_Line, int]]:
    """Yields each instruction, and how often a step runs it."""
    computations, entry = _computations(text)

    def visit(
        name: str, times: int, fusion: _Line | None, begun: set[str]
    ) -> Iterator[tuple[_Line, int]]:
        for line in computations.get(name, ()):
            chain = _CHAIN.search(line.text)
            if chain:
                # A TPU begins a collective in one fusion, and goes on in
                # others.
                if chain[1] in begun:
                    continue
                begun.add(chain[1])
            line = _in_fusion(line, fusion, name)
            yield line, times
            # A reduction's own function is not worth a look.
            if line.operation.removesuffix("-start") in _KINDS:
                continue
            loops = 1
            if line.operation == "while":
                loops = _trips(line, computations)
            is_fusion = line.operation == "fusion"
            within = line if is_fusion else None
            for called in _called(line):
                chains = begun if is_fusion else set()
                yield from visit(called, times * loops, within, chains)

    return visit(entry, 1, None, set())


def _called(line: _Line) -> list[str]:
    """Returns the names of the computations that an instruction calls."""
    matches = [one or several for one, several in _CALLED.findall(line.text)]
    return [name.lstrip("%") for match in matches for name in match.split(", ")]


def _in_fusion(line: _Line, fusion: _Line | None, name: str) -> _Line:
    """Returns a collective in a TPU's fusion, as what it is."""
    # A reduce-scatter is an all-reduce and a slice.
    is_scatter = line.operation == "all-reduce" and name.startswith(_SCATTERS)
    if fusion is None or not is_scatter:
        return line
    return _Line(fusion.result, "reduce-scatter", line.text)


def _trips(loop: _Line, computations: dict[str, list[_Line]]) -> int:
    """Returns how often a loop runs; 1 if its text does not say it."""
    trips = _TRIPS.search(loop.text)
    if trips:
        return int(trips[1])
    condition = _CONDITION.search(loop.text)
    lines = computations.get(condition[1], []) if condition else []
    limits = [
        int(limit[1])
        for line in lines
        if line.operation == "constant" and (limit := _LIMIT.search(line.text))
    ]
    counts_up = any("direction=LT" in line.text for line in lines)
    return limits[0] if counts_up and len(limits) == 1 else 1


def _computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    computations: dict[str, list[_Line]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.rstrip() == "}":
            current = None
        elif current is not None:
            instruction = _INSTRUCTION.match(line)
            if instruction:
                current.append(_Line(instruction[1], instruction[2], line))
            elif current:  # the attributes of a kernel have several lines
                last = current[-1]
                current[-1] = dataclasses.replace(last, text=last.text + line)
    return computations, entry


def _group_size(text: str, devices: int) -> int:
    """Returns how many devices exchange values with each other."""
    mesh, iota = _MESH.search(text), _IOTA.search(text)
    if mesh:
        sides = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        return math.prod(sides[name] for name in _NAME.findall(mesh[2]))
    if iota:
        return int(iota[1].split(",")[-1])
    listed = _LISTED.search(text)
    return len(listed[1].split(",")) if listed and listed[1] else devices


def _whole_bytes(line: _Line, kind: str, devices: int) -> int:
    """Returns the bytes of the whole values that a collective is about."""
    result = line.result
    if line.operation.endswith("-start") and kind != "all-reduce":
        # The operands, then the results.
        result = _elements(result)[1]
    total = sum(_num_bytes(*shape) for shape in _SHAPE.findall(result))
    return total * (devices if kind == "reduce-scatter" else 1)


def _elements(tuple_type: str) -> list[str]:
    """Splits a tuple's type into those of its elements."""
    elements, depth = [""], 0
    for character in tuple_type[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _num_bytes(dtype: str, sides: str) -> int:
    count = math.prod(int(side) for side in sides.split(",") if side)
    bits = _BITS.search(dtype)
    size = 8 if dtype in ("pred",) or bits is None else int(bits[1])
    if dtype.startswith("c"):
        size = int(bits[1]) if bits else 64
    return -(-count * size // 8)
