"""Numbers of compiled programs: their memory, collectives and work."""

from dataclasses import dataclass
from dataclasses import field


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind and group size in a program.

    Those in loops count as often as the loop runs, and those in all branches
    of a condition count.

    Args:
        kind: String, such as `"all-reduce"`.
        devices: Integer, how many devices exchange values with each other.
        count: Integer, how many there are in a step.
        num_bytes: Integer, bytes of the whole values, of all of them.
        sent: Integer, bytes that each device sends, if they go around a ring.
    """

    kind: str
    devices: int
    count: int
    num_bytes: int
    sent: int


@dataclass(frozen=True)
class CompiledProgram:
    """A program for each of a target's devices; numbers are of one device.

    Args:
        name: String, such as `"train_step"`.
        devices: Integer, how many devices run it.
        on_host: Boolean, true for a program on the CPU of a target's host.
        state: Mapping from a group of variables, such as `"trainable"`, to
            their bytes.
        received: Mapping from a group of values that other devices send for
            the step, such as `"gradients"`, to their bytes.
        batch: Integer, bytes of the rows that it is given.
        flops: Integer, floating-point operations of matrix products and
            convolutions, on average. Of the branches of a condition, the one
            with the most counts.
        padding: Integer, bytes that its arguments take beyond their sizes, as a
            TPU pads arrays.
        outputs: Integer, bytes of new results.
        aliased: Integer, bytes of results that take the place of the state.
        temporary: Integer, bytes for values in between.
        peak: Integer, bytes at the fullest moment.
        collectives: Tuple of `Collective`.
        to_host: Integer, how many times it exchanges values with the host.
        seconds: Float, how long it was compiled.
        refusal: String, why the compiler refused the program: it is too large
            for the device. What only the compiler knows is 0 then.
    """

    name: str
    devices: int
    on_host: bool
    state: dict[str, int]
    received: dict[str, int]
    batch: int
    flops: int
    padding: int = 0
    outputs: int = 0
    aliased: int = 0
    temporary: int = 0
    peak: int = 0
    collectives: tuple[Collective, ...] = ()
    to_host: int = 0
    seconds: float = field(default=0.0, compare=False)
    refusal: str = ""

    @property
    def kept(self) -> int:
        """Bytes of the state."""
        return sum(self.state.values())

    @property
    def sent(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(collective.sent for collective in self.collectives)
