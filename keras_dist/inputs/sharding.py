"""The policies by which workers share the rows of a `tf.data.Dataset`.

Every worker is given the same data. By default each reads all of it and takes
its own rows of each global batch, which needs no communication and gives the
same numbers as one device.
"""

import enum

from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.tf_data import TensorFlowSource


class AutoShardPolicy(enum.IntEnum):
    """The policy that spreads a `tf.data.Dataset` over several workers.

    Its values are those of `tf.data.experimental.AutoShardPolicy`, to which
    users set the option `experimental_distribute.auto_shard_policy` of a
    dataset. With one worker the policy has no effect.

    - `DATA`: each worker reads all data, and takes its own rows of each global
        batch. Other kinds of data are always read like this.
    - `AUTO`: the default, the same as `DATA`: each step has the same rows
        with any number of workers. `tf.distribute` would prefer files.
    - `FILE`: each worker reads its own files; there must be at least as many
        files as workers.
    - `HINT`: each worker reads its shard by
        `dataset.shard(SHARD_HINT, SHARD_HINT)`.
    - `OFF`: each worker reads all of its dataset.

    With `FILE`, `HINT` and `OFF`, workers read different data. Each worker
    splits its batches into as many parts as there are workers, and uses one
    part in each step. Workers may have different amounts of data: a worker at
    its end gets batches with 0 rows until all are at their end.

    Example:

    >>> from keras_dist.inputs.sharding import AutoShardPolicy
    >>> AutoShardPolicy(-1).name
    'OFF'
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


def policy_of(source: Source) -> AutoShardPolicy:
    """Returns the policy that a source's data asks for."""
    if isinstance(source, TensorFlowSource):
        return AutoShardPolicy(source.policy)
    return AutoShardPolicy.AUTO


def off_in_fit(num_workers: int) -> str:
    """Returns the message for `fit` of data with the policy `OFF`."""
    return (
        "`fit` and its relatives take each worker's rows of a global batch "
        "that all workers read. Received: a `tf.data.Dataset` whose "
        "`auto_shard_policy` is OFF, so that each of the "
        f"{num_workers} workers has data of its own. Expected: the whole "
        "dataset on each worker, in batches of the global size, with the "
        "policy AUTO, DATA or FILE and no sharding of your own; or "
        "`strategy.distribute_datasets_from_function`; or a loop of your own "
        "that passes the elements to `strategy.run`."
    )
