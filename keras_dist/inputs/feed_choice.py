"""Choice of the `Feed` for data, on one worker or on several."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from keras_dist.core.options import InputReplicationMode
from keras_dist.core.plan import Plan
from keras_dist.inputs.feeds import Feed
from keras_dist.inputs.feeds import GlobalFeed
from keras_dist.inputs.feeds import ParallelFeed
from keras_dist.inputs.feeds import TurnsFeed
from keras_dist.inputs.sharding import AutoShardPolicy
from keras_dist.inputs.sharding import off_in_fit
from keras_dist.inputs.sharding import policy_of
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.tf_data import TensorFlowSource
from keras_dist.inputs.worker_feeds import AgreedFeed
from keras_dist.inputs.worker_feeds import ShardFeed

if TYPE_CHECKING:
    from keras_dist.replica.strategy_core import StrategyBase


def feed_of_batches(strategy: "StrategyBase", source: Source) -> Feed:
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
    strategy: "StrategyBase",
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
    strategy: "StrategyBase",
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
