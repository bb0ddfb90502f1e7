"""Which worker reads what: the policies of `tf.data`, as far as we have them.

Every worker is given the same data. Unless the user asks for something else,
each reads all of it and takes its own rows of each global batch: that needs no
word between workers, and gives the numbers of one device.
"""

import enum

from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.tf_data import TensorFlowSource


class AutoShardPolicy(enum.IntEnum):
    """How a `tf.data.Dataset` is spread over several workers.

    It says what the option `experimental_distribute.auto_shard_policy` of a
    dataset means here, with the numbers of
    `tf.data.experimental.AutoShardPolicy`, which is what `tf.data.Options`
    takes. It changes nothing on one worker.

    - `DATA`: each worker reads all data, and takes its own rows of each global
        batch. Other kinds of data are always read like this.
    - `AUTO`: the default, the same as `DATA`: each step has the same rows
        with any number of workers. `tf.distribute` would prefer files.
    - `FILE`: each worker reads files of its own; there must be as many files
        as workers.
    - `HINT`: each worker reads what `dataset.shard(SHARD_HINT, SHARD_HINT)`
        is for it.
    - `OFF`: each worker reads its dataset as it is, all of it.

    With `FILE`, `HINT` and `OFF` workers read different data. A batch of each
    is cut into as many parts as there are workers, and each part is that
    worker's in one step. Workers may have different amounts: those that are
    at the end get batches of no rows until all are.

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
    """The policy that a source's data ask for."""
    if isinstance(source, TensorFlowSource):
        return AutoShardPolicy(source.policy)
    return AutoShardPolicy.AUTO


def off_in_fit(num_workers: int) -> str:
    """What to say of data with the policy `OFF` that is given to `fit`."""
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
