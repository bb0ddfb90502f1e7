"""The policies by which workers share the rows of a `tf.data.Dataset`."""

import enum
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist.core.nests import map_nest
from keras_dist.core.options import InputReplicationMode
from keras_dist.errors import WorkerLostError
from keras_dist.inputs.feeds import Feed
from keras_dist.inputs.feeds import GlobalFeed
from keras_dist.inputs.feeds import ParallelFeed
from keras_dist.inputs.feeds import ShardFeed
from keras_dist.inputs.feeds import TurnsFeed
from keras_dist.inputs.feeds import empty
from keras_dist.inputs.own_rows.adapters import OwnSteps
from keras_dist.inputs.own_rows.shares import Taken
from keras_dist.inputs.sources.choice import TensorFlowSource
from keras_dist.inputs.sources.choice import TooFewFilesError
from keras_dist.inputs.sources.source import INFINITE
from keras_dist.inputs.sources.source import UNKNOWN
from keras_dist.inputs.sources.source import Source
from keras_dist.inputs.sources.source import own_memory
from keras_dist.plugin.recorder import of_its_own
from keras_dist.plugin.workers import Workers
from keras_dist.replica.strategy_core import StrategyBase


class AutoShardPolicy(enum.IntEnum):
    """The policy that spreads a `tf.data.Dataset` over several workers.

    Its values equal those of `tf.data.experimental.AutoShardPolicy`. Set the
    dataset's option `experimental_distribute.auto_shard_policy` to one of
    them. With one worker, the policy has no effect.

    - `DATA`: each worker reads all data, and takes its own rows of each global
        batch. Other kinds of data are always read in this way.
    - `AUTO`: the default. It is the same as `DATA`: each step has the same rows
        with any number of workers. `tf.distribute` would prefer `FILE`.
    - `FILE`: each worker reads its own files. There must be at least as many
        files as workers.
    - `HINT`: each worker reads its shard by
        `dataset.shard(SHARD_HINT, SHARD_HINT)`.
    - `OFF`: each worker reads all of its dataset.

    With `FILE`, `HINT` and `OFF`, workers read different data. Each worker
    splits its batches into as many parts as there are workers, and uses one
    part in each step. Workers may have different amounts of data. A worker
    that has no more data gets batches with 0 rows until all workers have
    reached the end.

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
    if isinstance(source, TensorFlowSource):
        return AutoShardPolicy(source.policy)
    return AutoShardPolicy.AUTO


def off_in_fit(num_workers: int) -> str:
    """Returns the message for `fit` of data with the policy `OFF`."""
    return (
        "`fit` and similar methods read the same global batches on all "
        "workers, and each worker takes its own rows. Received: a "
        "`tf.data.Dataset` whose `auto_shard_policy` is OFF, so each of the "
        f"{num_workers} workers reads data of its own. Expected: the whole "
        "dataset on each worker, in batches of the global size, with the "
        "policy AUTO, DATA or FILE, and without sharding of your own. Or use "
        "`strategy.distribute_datasets_from_function`, or a loop of your own "
        "that passes the elements to `strategy.run`."
    )


def feed_of_batches(strategy: StrategyBase, source: Source) -> Feed:
    """Returns the feed of data in batches of the global size."""
    plan, policy = strategy.plan, policy_of(source)
    count, parts = plan.num_workers, plan.num_local_replicas
    reads_all = policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
    if count == 1 or reads_all or not isinstance(source, TensorFlowSource):
        whole, is_hint = source, policy is AutoShardPolicy.HINT
        if isinstance(source, TensorFlowSource) and is_hint:
            whole = source.shard(policy.value, 1, 0)
        rows = slice(plan.first_replica, plan.first_replica + parts)
        return GlobalFeed(whole, plan.num_replicas, rows)
    if policy is AutoShardPolicy.OFF:
        local_feed = ShardFeed(source, count, parts)
        return _agreed(strategy, lambda _: local_feed, off_in_fit(count))

    def feed_of(worker: int) -> Feed:
        shard = source.shard(policy.value, count, worker)
        return ShardFeed(shard, count, parts)

    return _agreed(strategy, feed_of)


def feed_of_function(
    strategy: StrategyBase,
    source_of: Callable[[int, int], Source],
    mode: InputReplicationMode,
) -> Feed:
    """Returns the feed of data that a function makes for each pipeline."""
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
    """Returns this worker's feed, with the same number of steps on all."""
    plan, workers = strategy.plan, strategy.executor.workers
    if plan.num_workers == 1:
        return feed_of(0)
    assert plan.cluster is not None and workers is not None
    index = plan.cluster.index
    local_feed = feed_of(index)

    def everyone() -> Feed:
        if refusal is not None:
            raise ValueError(refusal)
        return ParallelFeed(
            [
                local_feed if worker == index else feed_of(worker)
                for worker in range(plan.num_workers)
            ],
            plan.num_local_replicas,
        )

    parts = plan.num_local_replicas
    is_divided = refusal is None
    return AgreedFeed(local_feed, workers, parts, everyone, is_divided)


class _State(enum.IntFlag):
    """The flags that a worker sends to the others about a step."""

    HAS_DATA = 1
    LEAVES_OUT = 2
    FAILED = 4
    HAS_TOO_FEW_FILES = 8
    KNOWS_NO_EMPTY = 16


class AgreedFeed(Feed):
    """A feed of a worker's own data, with the same number of steps on all.

    In each step, workers exchange whether they have data or an error. A worker
    without more data gets 0 rows. `everyone` makes the feed of all workers.
    With `is_divided`, their data makes up global batches.
    """

    def __init__(
        self,
        local_feed: Feed,
        workers: Workers,
        parts: int,
        everyone: Callable[[], Feed],
        is_divided: bool,
    ) -> None:
        self.restarts = local_feed.restarts
        self._local_feed = local_feed
        self._workers = workers
        self._parts = parts
        self._everyone = everyone
        count = local_feed.cardinality
        numbers = workers.concatenate_numbers([count, local_feed.rows])
        counts, rows = set(numbers[::2]), set(numbers[1::2])
        self._cardinality = count if len(counts) == 1 else UNKNOWN
        # Of each step on each worker; 0 if they differ or are not known.
        is_known = is_divided and self._cardinality != UNKNOWN
        self._rows = local_feed.rows if is_known and len(rows) == 1 else 0

    def steps(self) -> Iterator[list[Any]]:
        local_steps = self._local_feed.steps()
        at_end: tuple[list[Any] | None, _State] | None = None
        while True:
            try:
                step = next(local_steps, None)
                # Computed once, because it may have to read data.
                at_end = at_end or self._at_end(step)
            except Exception as error:
                is_short = isinstance(error, TooFewFilesError)
                more = _State.HAS_TOO_FEW_FILES if is_short else _State(0)
                self._tell(_State.FAILED | more)
                raise
            nothing, state = at_end
            if step is not None:
                state |= _State.HAS_DATA
            if not self._goes_on(self._tell(state)):
                return
            if step is None:
                assert nothing is not None  # else `_goes_on` has raised
                step = nothing
            yield step
            if self._cardinality == INFINITE:
                # There is no end to agree on.
                yield from local_steps
                return

    @of_its_own("the next batch")
    def _tell(self, state: _State) -> list[_State]:
        """Returns the states of all workers; raises if another one failed."""
        states = [
            _State(number)
            for number in self._workers.concatenate_numbers([int(state)])
        ]
        if state & _State.FAILED:
            return states
        if any(
            worker_state & _State.HAS_TOO_FEW_FILES for worker_state in states
        ):
            raise TooFewFilesError(len(states))
        if any(worker_state & _State.FAILED for worker_state in states):
            raise WorkerLostError(
                "Reading data failed on "
                f"{self._names(states, _State.FAILED)}, so this worker can't "
                "go on either. See what that worker printed, and start all "
                "workers again."
            )
        return states

    def _goes_on(self, states: list[_State]) -> bool:
        have_data = [bool(state & _State.HAS_DATA) for state in states]
        if not any(have_data):
            return False
        if not all(have_data):
            if any(state & _State.LEAVES_OUT for state in states):
                return False
            if any(state & _State.KNOWS_NO_EMPTY for state in states):
                raise ValueError(
                    "A worker has less data than another, and can't make "
                    "empty batches to fill the gap.\nReceived: no element, or "
                    "an element that can't be split, on "
                    f"{self._names(states, _State.KNOWS_NO_EMPTY)}. Expected: "
                    "dense arrays, and at least one element on each worker. "
                    "A `tf.data.Dataset` may be empty, because it knows its "
                    "shapes."
                )
        return True

    def _names(self, states: list[_State], which: _State) -> str:
        addresses = self._workers.cluster.addresses
        return ", ".join(
            f"worker {index} ({addresses[index]})"
            for index, state in enumerate(states)
            if state & which
        )

    def _at_end(
        self, step: list[Any] | None
    ) -> tuple[list[Any] | None, _State]:
        """Returns this worker's parts of 0 rows, if any, and its flags."""
        leaves_out = self._local_feed.leaves_out
        state = _State.LEAVES_OUT if leaves_out else _State(0)
        try:
            if step is None:
                part = map_nest(_of_no_rows, self._local_feed.spec)
            else:
                # Copies: a view would keep the whole batch in memory.
                part = map_nest(own_memory, empty(step[0]))
        except (TypeError, ValueError):
            return None, state | _State.KNOWS_NO_EMPTY
        return [part] * self._parts, state

    @property
    def cardinality(self) -> int:
        return self._cardinality

    @property
    def spec(self) -> Any:
        return self._local_feed.spec

    def keras_data(self, own_rows: bool = False) -> Any:
        if not (own_rows and self._rows):
            return self._everyone().keras_data()
        cluster, count = self._workers.cluster, self._rows
        total = count * len(cluster.addresses)
        taken = Taken(count * cluster.index, count, total, code=0)
        return OwnSteps(self._local_feed.batches, self._cardinality, taken)


def _of_no_rows(leaf: object) -> Any:
    if leaf is None:
        return None
    if not isinstance(leaf, keras.KerasTensor) or leaf.sparse or leaf.ragged:
        raise ValueError(
            f"Can't make an empty array for {leaf!r}. Expected: the shape and "
            "dtype of a dense array."
        )
    shape = [0, *(size or 0 for size in leaf.shape[1:])] if leaf.shape else []
    if leaf.dtype == "string":
        return np.zeros(shape, "S1")
    try:
        return np.zeros(shape, leaf.dtype)
    except TypeError:  # such as float8, which NumPy may not know
        return keras.ops.zeros(shape, leaf.dtype)
