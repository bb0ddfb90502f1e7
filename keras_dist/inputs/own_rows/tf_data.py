"""`tf.data` pipelines of which a worker loads its own rows."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import numpy as np

from keras_dist.inputs.own_rows.shares import Shares
from keras_dist.inputs.own_rows.shares import is_wanted
from keras_dist.internals import keras_data
from keras_dist.plugin.executor import Executor

# Rows of a batch that TensorFlow may load at the same time.
_PARALLEL_ROWS = 10


class OwnRowsBatch(NamedTuple):
    """An element of a pipeline: a batch of own rows, and what was taken.

    No trainer takes such a tuple for a batch.
    """

    batch: Any
    first: Any
    count: Any
    total: Any
    code: Any

    @property
    def pair(self) -> tuple[Any, Any]:
        """The batch and the numbers of what was taken."""
        return self.batch, self[1:]


def is_own(dataset: Any) -> bool:
    """Returns whether a pipeline gives batches of own rows."""
    return isinstance(getattr(dataset, "element_spec", None), OwnRowsBatch)


def own_rows(
    executor: Executor,
    batch_size: int,
    map_func: Callable[..., Any] | None,
    num_parallel_calls: int | None,
    drop_remainder: bool,
) -> Callable[[Any], Any]:
    """Returns the transformation of `Strategy.own_rows`."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(
            "`batch_size` must be a positive integer, the rows of a global "
            f"batch. Received: batch_size={batch_size!r}."
        )
    if executor.workers is not None and is_wanted():
        shares = Shares(executor)
        return _of_worker(
            shares, batch_size, map_func, num_parallel_calls, drop_remainder
        )

    def apply(dataset: Any) -> Any:
        if map_func is not None:
            dataset = dataset.map(map_func, num_parallel_calls)
        return dataset.batch(batch_size, drop_remainder=drop_remainder)

    return apply


def _of_worker(
    shares: Shares,
    batch_size: int,
    map_func: Callable[..., Any] | None,
    num_parallel_calls: int | None,
    drop_remainder: bool,
) -> Callable[[Any], Any]:
    tf = keras_data.tensorflow()
    everyone = [range(0), *map(shares.of, range(1, batch_size + 1))]
    edges = np.array([(rows.start, rows.stop) for rows in everyone], "int32")

    def load(element: Any) -> Any:
        assert map_func is not None
        return (
            map_func(*element) if type(element) is tuple else map_func(element)
        )

    def apply(dataset: Any) -> Any:
        spec = None
        if map_func is not None:
            spec = dataset.map(map_func).element_spec

        def part(*elements: Any) -> OwnRowsBatch:
            batch = elements if len(elements) > 1 else elements[0]
            leaves = tf.nest.flatten(batch)
            total = tf.shape(leaves[0])[0]
            first, stop = tf.unstack(tf.gather(edges, total))
            texts = [tf.io.serialize_tensor(leaf) for leaf in leaves]
            code = tf.strings.to_hash_bucket_fast(
                tf.strings.join(texts), 2**31 - 1
            )
            rows = tf.nest.map_structure(lambda leaf: leaf[first:stop], batch)
            if map_func is not None:
                rows = tf.map_fn(
                    load,
                    rows,
                    fn_output_signature=spec,
                    parallel_iterations=_PARALLEL_ROWS,
                )
            numbers = first, stop - first, total, tf.cast(code, tf.int32)
            return OwnRowsBatch(rows, *numbers)

        batches = dataset.batch(batch_size, drop_remainder=drop_remainder)
        return batches.map(part, num_parallel_calls)

    return apply
