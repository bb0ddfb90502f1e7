"""The likely cause of a difference."""

from dataclasses import dataclass

import keras

from keras_dist.internals.keras_internals import compile_arguments
from keras_dist.internals.keras_internals import is_of_keras
from keras_dist.verification.report import Cause
from keras_dist.verification.report import Difference


@dataclass(frozen=True)
class Clues:
    """Observations besides the first difference."""

    is_random: bool  # one device differs from itself
    # Each row twice changes the value, as it does no mean; `None` if not tried.
    doubles: bool | None
    overrides: tuple[str, ...]  # loss classes with a `__call__` of their own
    adding: tuple[str, ...]  # layers that call `add_loss`
    sparse: tuple[str, ...]  # layers that may have sparse gradients


def cause_of(difference: Difference, clues: Clues) -> Cause:
    """Returns the likely cause of the first difference."""
    kind, name = difference.kind, difference.name
    if clues.is_random:
        return Cause(
            "randomness",
            "On one device alone, the same step twice gives other numbers. "
            "Something draws from no seed of Keras: use `keras.random` with "
            "a `keras.random.SeedGenerator`, or switch it off to compare.",
        )
    if difference.only:
        side = "one device" if difference.only == "one_device" else "strategy"
        return Cause(
            "a value of one side",
            f"'{name}' comes from the copy on the {side} only. Let no log, "
            "metric or gradient depend on whether there is a strategy, on the "
            "number of rows, or on what a replica sees.",
        )
    if kind == "metric":
        return Cause(
            "a metric",
            f"What '{name}' shows is computed from a replica's rows. Make it "
            "a `keras.metrics.Metric` that the model knows, or return a mean "
            "over rows from the step.",
        )
    if kind == "state":
        return _of_state(name, clues)
    if kind in ("weight", "slot"):
        return _of_update(name, clues)
    return _of_loss(kind, clues)


def _of_state(name: str, clues: Clues) -> Cause:
    if clues.doubles is False:
        return _COUPLED
    return Cause(
        "a state counted in shares",
        f"'{name}' counts or adds up rows, and a replica sees its share of "
        "them. Count in a `keras.metrics.Metric`, whose updates see all "
        "rows, or keep a mean over rows, which replicas can average.",
    )


def _of_update(name: str, clues: Clues) -> Cause:
    # The name of a slot contains that of its variable's layer.
    if any(layer in name for layer in clues.sparse):
        return Cause(
            "sparse gradients",
            f"The gradient of '{name}' is the same, what the optimizer makes "
            "of it is not. It comes as rows of a table, some of them several "
            "times, which optimizers square one by one. Compare with "
            "`keras.optimizers.SGD`, and report it to keras_dist.",
        )
    return Cause(
        "the optimizer",
        f"Gradients are the same, what the optimizer makes of '{name}' is "
        "not: its `apply` or `update_step` sees a replica's part, or adds "
        "rounding up. Compare with `keras.optimizers.SGD`.",
    )


def _of_loss(kind: str, clues: Clues) -> Cause:
    if clues.overrides and kind != "prediction":
        names = ", ".join(clues.overrides)
        return Cause(
            "an override of Loss.__call__",
            f"{names} overrides `__call__` of `keras.losses.Loss`, which gets "
            "a replica's rows there. Override `call`, and leave the "
            "reduction to Keras.",
        )
    if clues.doubles:
        adds = ""
        if clues.adding:
            adds = f" {', '.join(clues.adding)} calls `add_loss`."
        return Cause(
            "a sum over rows",
            "Each row twice makes it larger on one device: it is a sum over "
            "rows, and a replica sums its share of them. Take the mean, with "
            f"`keras.ops.mean`, or divide by a number of rows.{adds}",
        )
    return _COUPLED


_COUPLED = Cause(
    "rows coupled in a layer",
    "It depends on several rows at once, beyond a mean, and a replica sees "
    "its own rows only: a statistic of the batch in a layer, a comparison of "
    "rows in a loss. Compute losses of that kind in a `keras.losses.Loss` "
    "given to `compile`, which sees all rows, and statistics with "
    "`keras.layers.BatchNormalization`.",
)


def overrides_of(model: keras.Model) -> tuple[str, ...]:
    """Returns the model's loss classes that override `Loss.__call__`."""
    given = compile_arguments(model) or {}
    things = [*keras.tree.flatten(given.get("loss")), *vars(model).values()]
    names = [
        type(thing).__name__
        for thing in things
        if isinstance(thing, keras.losses.Loss)
        and not is_of_keras(type(thing))
        and _overrides_call(type(thing))
    ]
    return tuple(dict.fromkeys(names))


def sparse_of(model: keras.Model) -> tuple[str, ...]:
    """Returns the names of layers whose gradients may be rows of a table."""
    names = [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
        or getattr(getattr(layer, "input", None), "sparse", False)
    ]
    return tuple(dict.fromkeys(names))


def _overrides_call(cls: type) -> bool:
    own = [base for base in cls.__mro__ if not is_of_keras(base)]
    return any("__call__" in vars(base) for base in own)
