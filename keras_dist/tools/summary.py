"""`keras_dist.summary`: what each device keeps, and what a step sends."""

import keras

from keras_dist.fit.binding import binding_of
from keras_dist.tools.summaries.data import Summary

_PLAIN = "It has no strategy: a step sends nothing to other devices."
_ONE_REPLICA = "There is one replica: a step sends nothing to other devices."
_ESTIMATED = (
    "What a step sends is the least that it can; a backend may send more. Not "
    "counted: data, losses, metrics, statistics of batches."
)


def summary(model: keras.Model, max_rows: int | None = 60) -> Summary:
    """Tells where a model's variables are, and what training it sends.

    What devices keep is counted: a mirrored variable has a copy on each
    device, a central one has one on its parameter device, of a sharded one
    each device has a part, padded to equal sizes.

    What a step of `fit` sends is estimated, from `T` bytes of trainable
    variables (gradients have as many) and `n` replicas of a worker. An
    all-reduce takes `2 (n - 1) / n T` from each device, as a ring has it
    (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations"); where the optimizer's state is sharded, its
    two halves are a reduce-scatter of gradients and an all-gather of
    parameters, which take as much together (Rajbhandari et al., 2020, "ZeRO").
    Where variables are central, all of the model's go to each replica that is
    on another device, and `T` comes back from it. `W` workers send `2 (W - 1)
    / W T` each, after they have added up what is on their own devices.

    Args:
        model: A `keras.Model`, built, under any strategy or none.
        max_rows: Integer, how many variables to show. `None` means all; all
            are counted. Default 60.

    Returns:
        A `Summary`: `print` it, or leave it to a notebook. `rows` has the
        variables, `devices` the totals of devices, `transfers` what a step
        sends; numbers are bytes.

    Raises:
        ValueError: If the model is not built, or is none.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([
    ...         keras.Input((3,)), keras.layers.Dense(4, use_bias=False)])
    >>> found = keras_dist.summary(model)
    >>> found.rows[0].kind, found.rows[0].devices, found.rows[0].num_bytes
    ('mirrored', ('cpu:0', 'cpu:1'), 48)
    >>> [(each.device, each.num_bytes) for each in found.devices]
    [('cpu:0', 48), ('cpu:1', 48)]
    >>> found.bytes_sent
    96
    """
    # Only who asks for it pays for it.
    from keras_dist.planning.traffic import transfers
    from keras_dist.tools.summaries.counting import check_built
    from keras_dist.tools.summaries.counting import kept_of
    from keras_dist.tools.summaries.counting import load_of
    from keras_dist.tools.summaries.counting import placement_of
    from keras_dist.tools.summaries.rows import rows_of

    check_built(model)
    if max_rows is not None and max_rows < 0:
        raise ValueError(
            "`max_rows` is how many variables are shown. Received: "
            f"{max_rows}. Expected: an integer from 0, or `None` for all."
        )
    rows = rows_of(model)
    binding = binding_of(model)
    if binding is None:
        names = tuple(dict.fromkeys(d for row in rows for d in row.devices))
        notes = (*_notes(model), _PLAIN)
        return Summary(model.name, "", rows, names, (), notes, max_rows)
    plan = binding.strategy.plan
    placement = placement_of(plan)
    sent = transfers(load_of(model), placement, kept_of(model))
    notes = (*_notes(model), _ESTIMATED if sent else _ONE_REPLICA)
    return Summary(
        model.name,
        repr(binding.strategy).strip("<>"),
        rows,
        placement.all_devices,
        sent,
        notes,
        max_rows,
    )


def _notes(model: keras.Model) -> list[str]:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return []
    return [
        "The optimizer makes its slots with the first step: they are not "
        "counted yet."
    ]
