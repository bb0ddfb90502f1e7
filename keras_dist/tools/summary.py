"""`keras_dist.summary`: the memory of devices, and the traffic of a step."""

import keras

from keras_dist.plugin.front_end import bound
from keras_dist.tools.summaries.data import Summary

_PLAIN = "It has no strategy: a step sends nothing to other devices."
_ONE_REPLICA = "There is one replica: a step sends nothing to other devices."
_ESTIMATED = (
    "What a step sends is the least that it can; a backend may send more. Not "
    "counted: data, losses, metrics, statistics of batches."
)


def summary(model: keras.Model, max_rows: int | None = 60) -> Summary:
    """Counts the bytes that devices keep of a model and that a step sends.

    The bytes that devices keep are exact: each device has a copy of a mirrored
    variable, one parameter device has a central variable, and each device has
    a shard of a sharded variable, padded to equal sizes.

    The bytes that a step of `fit` sends are estimated, from `T` bytes of
    trainable variables (and so of gradients) and `n` replicas of a worker. In
    a ring all-reduce each device sends `2 (n - 1) / n T` bytes (Patarasuk and
    Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations"). With a sharded optimizer state, a reduce-scatter of
    gradients and an all-gather of parameters send as much together
    (Rajbhandari et al., 2020, "ZeRO"). With central variables, all of the
    model's variables go to each replica on another device, which sends `T`
    bytes of gradients back. With `W` workers, each sends `2 (W - 1) / W T`
    bytes more, after it has added up its own devices' gradients.

    Args:
        model: A built `keras.Model`, under any strategy or none.
        max_rows: Integer, number of variables to show, or `None` for all. All
            variables are counted in any case. Default 60.

    Returns:
        A `Summary`, which `print` and notebooks show. `rows` has the
        variables, `devices` the totals of devices, and `transfers` the
        transfers of a step. Numbers are bytes.

    Raises:
        ValueError: If `model` is no `keras.Model`, or is not built.

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
    from keras_dist.tools.summaries.counting import rows_of

    check_built(model)
    if max_rows is not None and max_rows < 0:
        raise ValueError(
            "`max_rows` is how many variables are shown. Received: "
            f"{max_rows}. Expected: an integer from 0, or `None` for all."
        )
    rows = rows_of(model)
    binding = bound(model)
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
