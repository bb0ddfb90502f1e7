"""The output of `keras-dist plan --target`: programs compiled for a target."""

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from keras_dist.planning import tables
from keras_dist.planning.estimates import Load
from keras_dist.planning.programs import CompiledProgram
from keras_dist.planning.targets import KINDS
from keras_dist.planning.targets import SLICES
from keras_dist.planning.targets import Target
from keras_dist.planning.targets import TargetKind

# Terms, and fields of a program, that only a compiler knows.
_OF_COMPILER = ("padding", "results", "temporary values")
_FIELDS_OF_COMPILER = (
    *("padding", "outputs", "aliased", "temporary", "peak"),
    *("collectives", "to_host", "sent"),
)
# Terms without a row where they are nothing.
_OPTIONAL = ("batch", "padding")
# The part of a GPU's memory that JAX takes unless it is told another one.
_TAKEN = 0.75


def report_of(
    what: str,
    target: Target,
    programs: Sequence[CompiledProgram],
    load: Load,
) -> tables.TableReport:
    """Returns the memory, the collectives and the work of programs."""
    shown, notes = [], []
    for program in programs:
        kind = _kind_of(program, target)
        shown.append(_memory(program, kind))
        if program.collectives:
            shown.append(_collectives(program))
        name = f"{program.name}: " if len(programs) > 1 else ""
        notes += [f"{name}{line}" for line in _lines(program, kind)]
    size = tables.bytes_text(load.weights + load.optimizer())
    notes.append(
        f"`fit` keeps up to {size} in the memory of each host, if it is free: "
        "the state at the start of an epoch."
    )
    title = f"{what}, compiled for {target}"
    return tables.TableReport(title, shown, notes)


def programs_json(
    target: Target, programs: Sequence[CompiledProgram]
) -> dict[str, Any]:
    """Returns all numbers of programs, in bytes, for JSON."""
    return {
        "target": str(target),
        "memory": target.kind.memory,
        "programs": [
            _program_json(program, _kind_of(program, target))
            for program in programs
        ],
    }


def _program_json(program: CompiledProgram, kind: TargetKind) -> dict[str, Any]:
    content = {
        **dataclasses.asdict(program),
        "kept": program.kept,
        "sent": program.sent,
        "fits": fits(program, kind),
    }
    if program.refusal:
        content |= dict.fromkeys(_FIELDS_OF_COMPILER)
    return content


def fits(program: CompiledProgram, kind: TargetKind) -> bool | None:
    """Tells whether a program fits a device; `None` if nobody knows."""
    if program.refusal:
        return False
    return None if kind.memory is None else program.peak <= kind.memory


def targets() -> tables.TableReport:
    """Returns the kinds of targets, with an example of each."""
    made = tables.table(
        "Targets",
        ("Kind", tables.WORD),
        ("Device", tables.WORDS),
        ("Memory", tables.NUMBER),
        ("Such as", tables.WORD),
    )
    for kind in KINDS.values():
        examples = {"cpu": ("8",), "gpu": ("8", "4x8"), "tpu": ("4x4",)}
        sizes = examples[kind.platform]
        if "2x2x2" in SLICES.get(kind.name, ()):
            sizes = ("2x2x2",)
        memory = "" if kind.memory is None else tables.bytes_text(kind.memory)
        names = ", ".join(f"{kind.name}:{size}" for size in sizes)
        made.add_row(kind.name, kind.title, memory, names)
    return tables.TableReport("", [made])


def _kind_of(program: CompiledProgram, target: Target) -> TargetKind:
    """Returns the kind of a program's devices: an update may be on the host."""
    return KINDS["cpu"] if program.on_host else target.kind


def _terms(program: CompiledProgram) -> dict[str, int]:
    return {
        **program.state,
        **{f"{name}, received": n for name, n in program.received.items()},
        "batch": program.batch,
        "padding": program.padding,
        "results": program.outputs,
        "temporary values": program.temporary,
    }


def _memory(program: CompiledProgram, kind: TargetKind) -> Table:
    where = (
        "the host" if program.on_host else f"{program.devices:,} x {kind.name}"
    )
    made = tables.table(
        "", (f"{program.name}: memory", tables.WORD), (where, tables.NUMBER)
    )
    for name, num_bytes in _terms(program).items():
        if name in _OF_COMPILER and program.refusal:
            made.add_row(name.capitalize(), "?")
        elif num_bytes or name not in _OPTIONAL:
            made.add_row(name.capitalize(), tables.bytes_text(num_bytes))
    if not program.refusal:
        made.add_row("At most", tables.bytes_text(program.peak), style="bold")
    if kind.memory is not None:
        made.add_row("Device has", tables.bytes_text(kind.memory))
    return made


def _collectives(program: CompiledProgram) -> Table:
    return tables.table(
        "",
        (f"{program.name}: collectives", tables.WORD),
        ("Devices", tables.NUMBER),
        ("Count", tables.NUMBER),
        ("Bytes", tables.NUMBER),
        ("Each sends", tables.NUMBER),
        rows=[
            (
                collective.kind,
                f"{collective.devices:,}",
                f"{collective.count:,}",
                tables.bytes_text(collective.num_bytes),
                tables.bytes_text(collective.sent),
            )
            for collective in program.collectives
        ],
    )


def _lines(program: CompiledProgram, kind: TargetKind) -> Iterator[str]:
    if program.refusal:
        yield (
            f"It does not fit. {_largest(program)} The compiler says: "
            f"{program.refusal}"
        )
        return
    if kind.memory is not None:
        yield _verdict(program, kind.memory)
        taken = kind.memory * _TAKEN
        if kind.platform == "gpu" and taken < program.peak <= kind.memory:
            yield (
                f"JAX takes {_TAKEN:.0%} of a GPU's memory at the start. Set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION to a larger part."
            )
    if program.to_host:
        yield f"Exchanges of values with the host in a step: {program.to_host}."
    if program.flops:
        yield (
            f"{program.flops:.3g} floating-point operations in the matrix "
            "products and convolutions of a device, on average."
        )
    yield f"Compiled in {program.seconds:.1f} s."


def _verdict(program: CompiledProgram, memory: int) -> str:
    share = f"{program.peak / memory:.1%} of the memory"
    if program.peak <= memory:
        return f"It fits: {share}."
    return f"It does not fit: {share}. {_largest(program)}"


def _largest(program: CompiledProgram) -> str:
    terms = _terms(program)
    largest = max(terms, key=lambda name: terms[name])
    known = " that is known" if program.refusal else ""
    return (
        f"The largest part{known} is {tables.bytes_text(terms[largest])} for "
        f"{largest}."
    )
