"""The policies by which workers share the rows of a `tf.data.Dataset`.

Every worker is given the same data. By default each reads all of it and takes
its own rows of each global batch, which needs no communication and gives the
same numbers as one device.
"""

import enum
from collections.abc import Callable

from keras_dist.core.options import InputReplicationMode
from keras_dist.core.plan import Plan
from keras_dist.inputs.feeds import Feed
from keras_dist.inputs.feeds import GlobalFeed
from keras_dist.inputs.feeds import ParallelFeed
from keras_dist.inputs.feeds import TurnsFeed
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.tf_data import TensorFlowSource
from keras_dist.inputs.worker_feeds import AgreedFeed
from keras_dist.inputs.worker_feeds import ShardFeed
from keras_dist.replica.strategy_core import StrategyBase


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

    >>> from keras_dist.inputs.feed_choice import AutoShardPolicy
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


def feed_of_batches(strategy: StrategyBase, source: Source) -> Feed:
    """Returns the feed of data in batches of the global size."""
    plan, policy = strategy.plan, policy_of(source)
    count, parts = plan.num_workers, plan.num_local_replicas
    if not isinstance(source, TensorFlowSource) or policy in (
        AutoShardPolicy.AUTO,
        AutoShardPolicy.DATA,
    ):
        return _feed_of_rows(plan, source)
    if count == 1:
        is_hint = policy is AutoShardPolicy.HINT
        whole = source.shard(policy.value, 1, 0) if is_hint else source
        return _feed_of_rows(plan, whole)
    if policy is AutoShardPolicy.OFF:
        own = ShardFeed(source, count, parts)
        return _agreed(strategy, lambda _: own, off_in_fit(count))

    def feed_of(worker: int) -> Feed:
        shard = source.shard(policy.value, count, worker)
        return ShardFeed(shard, count, parts)

    return _agreed(strategy, feed_of)


def _feed_of_rows(plan: Plan, source: Source) -> Feed:
    """Returns the feed of all data, from which a worker takes its rows."""
    first = plan.first_replica
    own = slice(first, first + plan.num_local_replicas)
    return GlobalFeed(source, plan.num_replicas, own)


def feed_of_function(
    strategy: StrategyBase,
    source_of: Callable[[int, int], Source],
    mode: InputReplicationMode,
) -> Feed:
    """Returns the feed of data that a function makes for each pipeline.

    `source_of` returns a pipeline's `Source`, given the number of pipelines
    and the pipeline's position.
    """
    plan = strategy.plan
    parts = plan.num_local_replicas

    def feed_of(worker: int) -> Feed:
        if mode is InputReplicationMode.PER_WORKER:
            return TurnsFeed(source_of(plan.num_workers, worker), parts)
        ids = range(worker * parts, (worker + 1) * parts)
        sources = [source_of(plan.num_replicas, index) for index in ids]
        return ParallelFeed([TurnsFeed(source, 1) for source in sources])

    return _agreed(strategy, feed_of)


def _agreed(
    strategy: StrategyBase,
    feed_of: Callable[[int], Feed],
    refusal: str | None = None,
) -> Feed:
    """Returns this worker's feed, with the same number of steps on all.

    `feed_of` returns the `Feed` of a worker, given its index; `refusal` is the
    error message of `fit` for data that only one worker can read.
    """
    plan, workers = strategy.plan, strategy.executor.workers
    if plan.num_workers == 1:
        return feed_of(0)
    assert plan.cluster is not None and workers is not None
    index = plan.cluster.index
    own = feed_of(index)

    def everyone() -> Feed:
        if refusal is not None:
            raise ValueError(refusal)
        return ParallelFeed(
            [
                own if worker == index else feed_of(worker)
                for worker in range(plan.num_workers)
            ],
            plan.num_local_replicas,
        )

    return AgreedFeed(own, workers, plan.num_local_replicas, everyone)
