"""The bytes of a model and of its optimizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Bytes of one number of a variable under each dtype policy of Keras. Gradients
# and slots have the same type; mixed policies compute in another one.
VARIABLE_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "mixed_float16": 4,
    "mixed_bfloat16": 4,
}

# Slots with the shape of their variable that Keras' optimizers make by default.
# Adafactor and Muon are missing: their slots depend on the variables' shapes.
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

# Bytes of the step counter and the learning rate.
_COUNTERS = 8
# Bytes of the loss-scaling optimizer around it for float16: a step counter and
# a learning rate of its own, the scale, and the steps since the scale changed.
_SCALING = 16


@dataclass(frozen=True)
class Flat:
    """Numbers of one type that can be split into parts anywhere.

    There are `length` numbers, of `num_bytes` each.
    """

    length: int
    num_bytes: int

    def part(self, count: int) -> int:
        """Returns the bytes of one of `count` parts, the last one padded."""
        return math.ceil(self.length / count) * self.num_bytes


@dataclass(frozen=True)
class Load:
    """The bytes of a model's variables and of its optimizer's.

    Args:
        trainable: Bytes of trainable variables. Gradients have as many.
        frozen: Bytes of the model's other variables.
        slots: What the optimizer keeps for each parameter.
        counters: Bytes of the optimizer's other variables.
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
        """Returns the optimizer's bytes on each of `parts` replicas.

        Slots are split among the replicas, counters are not.
        """
        return self.counters + sum(flat.part(parts) for flat in self.slots)


def load_of_parameters(
    num_parameters: int,
    dtype: str = "float32",
    optimizer: str = "adam",
    slots: int | None = None,
) -> Load:
    """Returns the load of a number of parameters, all of them trainable.

    `slots` replaces the number of slots for each parameter that `SLOTS` has.

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
