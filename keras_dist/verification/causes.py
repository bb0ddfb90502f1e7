"""The likely cause of a difference."""

from collections.abc import Sequence

import keras

from keras_dist.internals.keras_internals import compile_arguments
from keras_dist.internals.keras_internals import is_of_keras
from keras_dist.verification.report import Cause
from keras_dist.verification.report import Difference


def cause_of(
    difference: Difference,
    model: keras.Model,
    is_random: bool,  # one device differs from itself
    doubles: bool | None,  # each row twice changes it; `None` if not tried
    sees_all_rows: bool,  # steps do, and the framework divides them
    adding: Sequence[str],  # layers that call `add_loss`
) -> Cause:
    """Returns the likely cause of the first difference."""
    kind, name = difference.kind, difference.name
    if is_random:
        return Cause(
            "randomness",
            "On one device alone, the same step twice gives other numbers. "
            "Use `keras.random` with a `keras.random.SeedGenerator`, or switch "
            "the random part off to compare.",
        )
    if difference.only:
        side = difference.only.replace("_", " ")
        return Cause(
            "a value of one side",
            f"'{name}' exists only with {side}. Logs, metrics and gradients "
            "must not depend on the strategy, or on a replica's rows.",
        )
    if sees_all_rows and kind in ("loss", "gradient", "state", "metric"):
        return Cause(
            "an operation that the compiler divides",
            "XLA computes something else for a few operations along the rows, "
            "such as gradients of windows that overlap. Leave layers out to "
            "find the operation, compute it along another axis, and report it "
            "to keras_dist.",
        )
    if kind == "metric":
        return Cause(
            "a metric",
            f"'{name}' is computed from one replica's rows. Make it a "
            "`keras.metrics.Metric` that the model knows, or return a mean "
            "over rows from the step.",
        )
    if kind == "state" and doubles is not False:
        return Cause(
            "a state counted in shares",
            f"'{name}' counts or adds up rows, but a replica sees only its "
            "share of them. Declare what it is where it is made, by "
            "`aggregation='sum'` or 'mean', or count in a "
            "`keras.metrics.Metric`.",
        )
    # The name of a slot contains that of its variable's layer.
    if kind in ("weight", "slot"):
        return _SPARSE if any(n in name for n in _sparse_of(model)) else _UPDATE
    overrides = _overrides_of(model)
    if overrides and kind not in ("prediction", "state"):
        return Cause(
            "an override of Loss.__call__",
            f"{', '.join(overrides)} overrides `__call__` of "
            "`keras.losses.Loss`, which may get only one replica's rows. "
            "Override `call`, and leave the reduction to Keras.",
        )
    if not doubles:
        return _COUPLED
    layers = ", ".join(dict.fromkeys(adding))
    adds = f" {layers} calls `add_loss`." if layers else ""
    return Cause(
        "a sum over rows",
        "On one device, the value grows if each row comes twice, but a "
        "replica sums only its share of the rows. Write the sum as "
        "`keras_dist.sum_over_rows(x)`, or take the mean with "
        f"`keras.ops.mean`.{adds}",
    )


_SPARSE = Cause(
    "sparse gradients",
    "The gradient is the same, but the update that the optimizer makes from "
    "it is not. It comes as rows of a table, some of them several times. "
    "Compare with `keras.optimizers.SGD`, and report it to keras_dist.",
)
_UPDATE = Cause(
    "the optimizer",
    "Gradients are the same, but the update is not. The optimizer's `apply` "
    "or `update_step` sees only a replica's part, or adds up rounding errors. "
    "Compare with `keras.optimizers.SGD`.",
)
_COUPLED = Cause(
    "rows coupled in a layer",
    "The value depends on several rows at once, but a replica sees only its "
    "own. Examples are a statistic of the batch, and a comparison of rows in "
    "a loss. Give such a loss to `compile` as a `keras.losses.Loss`, which "
    "sees all rows. For statistics, use `keras.layers.BatchNormalization`.",
)


def _overrides_of(model: keras.Model) -> list[str]:
    """Returns the model's loss classes that override `Loss.__call__`."""
    given = compile_arguments(model) or {}
    things = [*keras.tree.flatten(given.get("loss")), *vars(model).values()]
    names = [
        type(thing).__name__
        for thing in things
        if isinstance(thing, keras.losses.Loss)
        and any(
            "__call__" in vars(base) and not is_of_keras(base)
            for base in type(thing).__mro__
        )
    ]
    return list(dict.fromkeys(names))


def _sparse_of(model: keras.Model) -> list[str]:
    """Returns the names of layers whose gradients may be rows of a table."""
    return [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
        or getattr(getattr(layer, "input", None), "sparse", False)
    ]
