"""Several steps of a replica function in one program."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from jax import lax
from jax import numpy as jnp

from keras_dist_jax.bodies import run_region
from keras_dist_jax.layout import Layout
from keras_dist_jax.results import packed
from keras_dist_jax.results import unpacked
from keras_dist_jax.structure import unflatten
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import current_trace

if TYPE_CHECKING:
    from keras_dist.plugin.front_end import RunsReplicas


def scanned(
    strategy: "RunsReplicas",
    layout: Layout | None,
    fn: Callable[..., Any],
    structure: Any,
    leaves: Sequence[Any],
    steps: int,
) -> Any:
    """Calls a replica function for one batch after another.

    `structure` is that of one step's arguments; `leaves` are the traced
    arguments of all steps, one step after the other. `layout` is `None` for one
    replica.

    Returns:
        Nest of results, with the steps along a new first axis.
    """
    count = len(leaves) // steps
    stacked = [jnp.stack(leaves[index::count]) for index in range(count)]
    trace = current_trace()
    assert trace is not None
    if layout is not None:
        args = unflatten(structure, iter(stacked))
        return run_region(strategy, layout, trace, fn, args, {}, scans=True)

    outlines: list[Any] = []

    def step(leaves: Sequence[Any]) -> list[Any]:
        args = unflatten(structure, iter(leaves))
        arrays, outline = packed(strategy.run_uncompiled(fn, args))
        outlines.append(outline)
        return arrays

    if trace.is_survey:
        arrays = step([leaf[0] for leaf in stacked])
    else:
        arrays = _on_one(trace, step, stacked)
    return unpacked(outlines[-1], arrays)


def _on_one(
    trace: Trace,
    step: Callable[[Sequence[Any]], list[Any]],
    stacked: list[Any],
) -> list[Any]:
    written: dict[int, Any] = {}

    def body(values: dict[int, Any], leaves: list[Any]) -> Any:
        inner = trace.within(values)
        with inner.entered():
            result = step(leaves)
        trace.unknown = trace.unknown or inner.unknown
        trace.variables.update(inner.variables)
        written.update(inner.written)
        return {
            key: lax.convert_element_type(inner.values[key], value.dtype)
            for key, value in values.items()
        }, result

    values, results = lax.scan(body, dict(trace.values), stacked)
    for key, variable in written.items():
        if key in values:
            trace.write(variable, values[key])
    arrays: list[Any] = results
    return arrays
