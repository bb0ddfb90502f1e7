"""Reading data inside of a `tf.function`, in a loop of the graph."""

from collections.abc import Callable
from typing import Any

import keras

from keras_dist.inputs.feeds import Feed
from keras_dist.inputs.feeds import GlobalFeed
from keras_dist.inputs.placement import BatchPlacement


def reduce_in_graph(
    feed: Feed,
    placement: BatchPlacement,
    initial_state: Any,
    reduce_func: Callable[[Any, Any], Any],
) -> Any:
    """Implements `DistributedDataset.reduce` in a loop of the graph.

    Raises `NotImplementedError` if a graph can't read the data.
    """
    data = feed.trace() if isinstance(feed, GlobalFeed) else None
    if not isinstance(feed, GlobalFeed) or data is None:
        raise NotImplementedError(
            "Inside of a `tf.function` a distributed dataset can be read only "
            "if it was made by `experimental_distribute_dataset` of a "
            "`tf.data.Dataset` that all workers read alike. Received: other "
            f"data, in a `{type(feed).__name__}`. Expected: a loop outside "
            "that passes each element to a compiled step."
        )
    iterator = iter(data)

    def step(_: Any, state: Any) -> tuple[Any, Any]:
        optional = iterator.get_next_as_optional()
        has_value = optional.has_value()
        # A graph has both branches, so the loop itself checks for the end.
        return has_value, keras.ops.cond(
            has_value,
            lambda: reduce_func(
                state, placement(feed.split(optional.get_value()))
            ),
            lambda: state,
        )

    _, state = keras.ops.while_loop(
        lambda has_value, _: has_value, step, (True, initial_state)
    )
    return state
