"""Machines that a model can be compiled for, whether or not they are here."""

import math
import re
from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True)
class TargetKind:
    """A kind of device.

    Args:
        name: String, as in a target's name.
        title: String, the maker's name of the device.
        platform: String, one of `"cpu"`, `"gpu"` and `"tpu"`.
        memory: Integer, the bytes that programs can use, or `None` for the
            memory of the machine.
    """

    name: str
    title: str
    platform: str
    memory: int | None = None


# A GPU's memory is what its driver reports. A TPU's is what its compiler lets
# a program use. A core of v4 and of TPU7x is a device of its own.
KINDS = {
    kind.name: kind
    for kind in (
        TargetKind("cpu", "virtual CPU devices", "cpu"),
        TargetKind("a100", "NVIDIA A100 80 GB", "gpu", 84_987_740_160),
        TargetKind("h100", "NVIDIA H100 80 GB", "gpu", 84_942_979_072),
        TargetKind("h200", "NVIDIA H200", "gpu", 150_121_545_728),
        TargetKind("v4", "TPU v4, a core", "tpu", int(15.25 * _GIB)),
        TargetKind("v5e", "TPU v5e", "tpu", int(15.75 * _GIB)),
        TargetKind("v5p", "TPU v5p", "tpu", int(95.74 * _GIB)),
        TargetKind("v6e", "TPU v6e", "tpu", int(31.25 * _GIB)),
        TargetKind("tpu7x", "TPU7x, a core", "tpu", int(94.75 * _GIB)),
    )
}
_MOST_DEVICES = 10_000
# The slices of TPUs whose chips lie in a plane, and the small ones of others.
# Larger ones have sides that are multiples of 4.
_PLANES = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]
_CUBES = ["2x2x1", "2x2x2", "2x2x4", "2x4x4"]
SLICES = {
    "v4": _CUBES,
    "v5e": _PLANES,
    "v5p": ["1x1x1", *_CUBES],
    "v6e": _PLANES,
    "tpu7x": ["1x1x1", *_CUBES],
}
_NAME = re.compile(r"([a-z0-9]+):([1-9]\d*(?:x[1-9]\d*)*)", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """A machine, or several: `h100:4x8` has 4 hosts of 8 GPUs.

    The sides of a TPU are those of the slice: `v5e:16x16` has 256 chips.
    """

    kind: TargetKind
    sides: tuple[int, ...]

    def __str__(self) -> str:
        sides = self.sides
        if self.kind.platform != "tpu" and sides[0] == 1:  # one host
            sides = sides[1:]
        return f"{self.kind.name}:{'x'.join(map(str, sides))}"


def read_target(text: str) -> Target:
    """Reads a target's name.

    Raises:
        ValueError: If there is no such kind, or if the sides don't fit it.
    """
    match = _NAME.fullmatch(text.strip())
    kind = KINDS.get(match[1].lower()) if match else None
    if match is None or kind is None:
        raise ValueError(
            f"--target {text}: there is no such target.\nExpected: a kind and "
            "a size, such as h100:8 (GPUs), h100:4x8 (hosts x GPUs), "
            "v5e:16x16 (a TPU's slice) or cpu:8. Kinds: "
            f"{', '.join(KINDS)}. `--target list` describes them."
        )
    sides = tuple(map(int, match[2].split("x")))
    if kind.platform != "tpu":
        sides = (1, *sides) if len(sides) == 1 else sides
    if kind.platform == "tpu":
        _check_slice(text, kind, sides)
    elif len(sides) != 2:
        raise ValueError(
            f"--target {text}: {kind.name} needs devices, or hosts x devices, "
            "such as 8 or 4x8."
        )
    count = math.prod(sides)
    if count > _MOST_DEVICES:
        raise ValueError(
            f"--target {text}: too many devices. Received: {count:,}. "
            f"Expected: at most {_MOST_DEVICES:,}."
        )
    return Target(kind, sides)


def _check_slice(text: str, kind: TargetKind, sides: tuple[int, ...]) -> None:
    known = SLICES[kind.name]
    is_known = "x".join(map(str, sides)) in known
    expected = f"one of {', '.join(known)}"
    if known is not _PLANES:
        expected += (
            ", or three multiples of 4, the smallest first, such as 4x4x8"
        )
        is_large = len(sides) == 3 and not any(side % 4 for side in sides)
        is_known |= is_large and list(sides) == sorted(sides)
    if not is_known:
        raise ValueError(
            f"--target {text}: there is no such slice of {kind.title}. "
            f"Expected: {expected}."
        )
