"""What is trained, in bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The type of variables under each of Keras' dtype policies. Gradients and
# slots have it too; mixed policies compute in another one.
VARIABLE_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "mixed_float16": 4,
    "mixed_bfloat16": 4,
}

# Slots with the shape of their variable that Keras' optimizers make, as they
# are by default. Adafactor and Muon are not here: theirs depend on shapes.
SLOTS = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "ftrl": 2,
    "lamb": 2,
    "lion": 1,
    "nadam": 2,
    "rmsprop": 1,
    "schedulefreeadamw": 2,
    "sgd": 0,
}

# The count of steps and the learning rate.
_COUNTERS = 8
# Of the optimizer that Keras wraps around for float16: its own two of those,
# the scale, and its age.
_SCALING = 16


@dataclass(frozen=True)
class Flat:
    """Numbers of one type, that can be cut into parts anywhere.

    Args:
        length: Integer, how many.
        num_bytes: Integer, of each.
    """

    length: int
    num_bytes: int

    def part(self, count: int) -> int:
        """Bytes of one of `count` equal parts, the last of them padded."""
        return math.ceil(self.length / count) * self.num_bytes


@dataclass(frozen=True)
class Load:
    """A model and its optimizer.

    Args:
        trainable: Integer, bytes of trainable variables. Gradients have as
            many.
        frozen: Integer, bytes of the model's other variables.
        slots: Tuple of `Flat`, what the optimizer keeps for each parameter.
        counters: Integer, bytes of the optimizer's other variables.
    """

    trainable: int
    frozen: int = 0
    slots: tuple[Flat, ...] = ()
    counters: int = 0

    @property
    def weights(self) -> int:
        """Bytes of the model's variables."""
        return self.trainable + self.frozen

    def optimizer(self, parts: int = 1) -> int:
        """Bytes of the optimizer's variables where slots are cut.

        Args:
            parts: Integer, over how many replicas.
        """
        return self.counters + sum(flat.part(parts) for flat in self.slots)


def load_of_parameters(
    num_parameters: int,
    dtype: str = "float32",
    optimizer: str = "adam",
    slots: int | None = None,
) -> Load:
    """The load of so many parameters, all of them trainable.

    Args:
        num_parameters: Integer.
        dtype: String, a dtype policy of Keras.
        optimizer: String, a name in `SLOTS`.
        slots: Integer, slots for each parameter, in place of the optimizer's.

    Raises:
        ValueError: If a name is unknown.
    """
    if dtype not in VARIABLE_BYTES:
        raise ValueError(_unknown("dtype policy", dtype, list(VARIABLE_BYTES)))
    name = optimizer.lower().replace("_", "").replace("-", "")
    if slots is None and name not in SLOTS:
        raise ValueError(
            _unknown("optimizer", optimizer, list(SLOTS))
            + " For another one, say how many slots it makes for each "
            "parameter, or name a model."
        )
    count = SLOTS[name] if slots is None else slots
    each = VARIABLE_BYTES[dtype]
    scaling = _SCALING if dtype == "mixed_float16" else 0
    return Load(
        trainable=num_parameters * each,
        slots=(Flat(num_parameters, each),) * count,
        counters=_COUNTERS + scaling,
    )


def _unknown(what: str, received: str, known: Sequence[str]) -> str:
    return (
        f"There is no {what} of that name. Received: {received!r}. Expected: "
        f"one of {', '.join(known)}."
    )
