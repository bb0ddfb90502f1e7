"""The line that the first `fit` under a strategy prints."""

import inspect
import os
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.core.nests import leaves_of
from keras_dist.core.rows import readable
from keras_dist.core.rows import shape_of
from keras_dist.fit import own_code
from keras_dist.fit.workers.agreement import first_of
from keras_dist.fit.workers.entry import why_all_in
from keras_dist.inputs.own_rows.adapters import why_all
from keras_dist.inputs.sources.choice import TensorFlowSource
from keras_dist.internals import keras_data
from keras_dist.replica.strategy_core import StrategyBase

_KERAS_BATCH_SIZE = 32
_introduced: "weakref.WeakSet[StrategyBase]" = weakref.WeakSet()


def introduce(
    strategy: StrategyBase,
    model: keras.Model,
    fit: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Prints, once for each strategy, how it divides the work of `fit`."""
    if strategy in _introduced or not _is_wanted(strategy):
        return
    given = _given(fit, args, kwargs)
    if given.get("verbose", 0) != 0:
        _introduced.add(strategy)
        size = _batch_size(given.get("x"), given.get("batch_size"))
        reads = ""
        if strategy.plan.num_workers > 1:
            reads = why_all_in(model, strategy.executor)
            reads = reads or why_all(given.get("x"))
        users_code = own_code.names(model)
        print(banner(strategy, size, users_code, reads), flush=True)


def _given(
    fit: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    signature = inspect.signature(fit)
    try:
        bound_arguments = signature.bind(None, *args, **kwargs)
    except TypeError:
        return {}  # The call fails with Keras' own error.
    bound_arguments.apply_defaults()
    given: dict[str, Any] = bound_arguments.arguments
    both: dict[str, Any] = given | given.get("kwargs", {})
    return both


def rows_of_a_batch(
    fit: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int:
    """Returns the rows of a full global batch; 0 if unknown."""
    given = _given(fit, args, kwargs)
    return _batch_size(given.get("x"), given.get("batch_size"))


def banner(
    strategy: StrategyBase,
    batch_size: int,
    users_code: Sequence[str] = (),
    why_all_rows: str = "",
) -> str:
    """Returns the line: backend, devices, replicas, workers and their rows.

    `why_all_rows` says why workers read the rows of others, too.
    """
    plan = strategy.plan
    parts = [
        f"keras_dist on {keras.backend.backend()}: {str(strategy).strip('<>')}",
        _counted(plan.num_replicas, "replica"),
        _counted(plan.num_workers, "worker"),
    ]
    if not batch_size:
        parts.append("batch size set by the data")
    elif plan.num_replicas == 1:
        parts.append(f"batches of {_counted(batch_size, 'row')}")
    else:
        shares = strategy.executor.rows_in_fit(np.zeros((batch_size, 0)))
        sizes = sorted({len(share) for share in shares})
        rows_text = " to ".join(
            str(size) for size in {sizes[0]: 0, sizes[-1]: 0}
        )
        parts.append(
            f"global batches of {_counted(batch_size, 'row')}, {rows_text} per "
            "replica"
        )
    if plan.num_workers > 1 and why_all_rows:
        parts.append(
            "each worker reads all of the data and takes its own rows "
            f"({why_all_rows})"
        )
    elif plan.num_workers > 1:
        parts.append("each worker loads its own rows")
    elif plan.num_replicas > 1:
        parts.append("each batch is split by rows")
    if users_code and plan.num_replicas > 1:
        parts.append(
            f"`strategy.verify` compares your {first_of(users_code)} with one "
            "device"
        )
    return "; ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _is_wanted(strategy: StrategyBase) -> bool:
    cluster = strategy.plan.cluster
    return (
        os.environ.get("KERAS_DIST_BANNER") != "0"
        and keras.config.is_interactive_logging_enabled()
        and (cluster is None or cluster.is_chief)
    )


def _batch_size(x: Any, given: Any) -> int:
    """Returns the rows of a full global batch; 0 if unknown without reading."""
    if keras_data.is_tf_dataset(x):
        return TensorFlowSource(x).batch_size
    if keras_data.is_torch_dataloader(x):
        return int(x.batch_size or 0)
    shapes = [shape_of(readable(leaf)) for leaf in leaves_of(x)]
    rows = next((shape[0] or 0 for shape in shapes if shape), 0)
    is_usable = isinstance(given, int) and given > 0
    return min(rows, given if is_usable else _KERAS_BATCH_SIZE)
