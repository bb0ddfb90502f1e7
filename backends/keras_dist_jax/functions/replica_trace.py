"""`strategy.run` inside of a program: one body that all replicas run."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp
from keras import ops

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import SEED_STRIDE
from keras_dist.plugins import WHOLE
from keras_dist.plugins import PerReplica
from keras_dist.plugins import ReduceOp
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaCall
from keras_dist.plugins import ReplicaRunner
from keras_dist.plugins import RunsReplicas
from keras_dist.plugins import check_gather
from keras_dist.plugins import check_owner
from keras_dist.plugins import map_nest
from keras_dist.plugins import opened
from keras_dist.plugins import outside_replicas
from keras_dist.plugins import widened
from keras_dist_jax.functions.agreement import OwnList
from keras_dist_jax.functions.cells import cell_of
from keras_dist_jax.functions.cells import read
from keras_dist_jax.functions.cells import write
from keras_dist_jax.functions.gradients import summed_by
from keras_dist_jax.functions.tracing import Trace
from keras_dist_jax.functions.tracing import TraceScope
from keras_dist_jax.functions.tracing import current_trace
from keras_dist_jax.functions.tracing import share_of
from keras_dist_jax.jax_internals import is_traced_by
from keras_dist_jax.jax_internals import tracing_with
from keras_dist_jax.placement.arrays import eagerly
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import default_device
from keras_dist_jax.placement.per_replica import Local
from keras_dist_jax.programs.jaxprs import AXIS
from keras_dist_jax.sharding import scans
from keras_dist_jax.sharding import shards
from keras_dist_jax.sharding.shards import Shards
from keras_dist_jax.variables.bindings import is_per_replica

T = TypeVar("T")
# The roles of the cells in a replica function: of what a replica has of a
# variable, which may be a part, and of all of one in parts.
OWN, ALL = "own", "all"
# Most elements of a value that the compiler may know, such as a sum of no rows.
_MAY_BE_CONSTANT = 2**16


class ReplicaTrace:
    """The variables that one replica reads and writes while it is traced."""

    def __init__(
        self,
        strategy: RunsReplicas,
        layout: Layout,
        trace: Trace,
        is_sharded: bool,
        runner: Callable[["ReplicaTrace"], "TracedRunner"],
    ) -> None:
        self.strategy = strategy
        self.layout = layout
        self.trace = trace
        self.count = layout.num_replicas
        # The first value that the body traces: it knows the body's trace.
        self.index = lax.axis_index(AXIS)
        # Ids of sharded variables to which a replica has assigned all.
        self._are_whole: set[int] = set()
        self._is_sharded = is_sharded
        self._all_of: dict[int, Any] = {}
        # Ids of those that were read in a branch or loop.
        self._read_inside: set[int] = set()
        self.scope = ReplicaTraceScope(self)
        self.runner = runner(self)
        # By the id of the first component of a gathered value: all components,
        # and this replica's own.
        self._gathered: dict[int, tuple[list[Any], Any]] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes this the current one of its trace, while open."""
        before, self.trace.of_replica = self.trace.of_replica, self
        try:
            yield
        finally:
            self.trace.of_replica = before

    def read(self, variable: keras.Variable) -> Any:
        """Returns a variable's value on the replica, or `None` without one."""
        check_owner(variable, self.strategy)
        if not self.trace.has(variable):
            return None
        if (
            self.is_sharded(variable)
            and id(variable) in self.trace.inside.whole
        ):
            self._make_whole(variable)
        if not self.is_sharded(variable):
            return read(self._cell_of_value(variable))
        division, key = shards.shards_of(variable), id(variable)
        if not is_traced_by(self.index):
            self._read_inside.add(key)
        if scans.gathers_again() or key in self.trace.inside.parts:
            return division.gathered(self.part(variable))
        if key not in self._all_of:
            with tracing_with(self.index):
                self._all_of[key] = division.gathered(self.part(variable))
        return self._all_of[key]

    def _note_assignment(
        self, variable: keras.Variable, known: set[int]
    ) -> None:
        """Notes an assignment to a sharded variable, in a branch or loop."""
        key = id(variable)
        self._all_of.pop(key, None)
        if key not in known and not is_traced_by(self.index):
            known.add(key)
            if key in self._read_inside:
                self.trace.inside.is_outdated = True

    def _make_whole(self, variable: keras.Variable) -> None:
        """Lets replicas have all of a variable, of which they had parts."""
        self._are_whole.add(id(variable))
        with tracing_with(self.index):
            whole = shards.shards_of(variable).gathered(self.part(variable))
            write(self._cell_of_value(variable), whole)

    def is_sharded(self, variable: keras.Variable) -> bool:
        """Tells whether a read gathers the parts of all replicas."""
        is_divided = self.divided_by(variable) is not None
        return is_divided and id(variable) not in self._are_whole

    def divided_by(self, variable: keras.Variable) -> Shards | None:
        """Returns how replicas divide a variable; `None` if each has it all."""
        if not self._is_sharded or not shards.is_sharded(variable):
            return None
        division = shards.shards_of(variable)
        return division if division.is_over_replicas else None

    def _cell_of_value(self, variable: keras.Variable) -> jax.Ref:
        role = OWN if self.divided_by(variable) is None else ALL
        return cell_of(variable, role, variable.shape)

    def _cell_of_shard(self, variable: keras.Variable) -> jax.Ref:
        division = shards.shards_of(variable)
        return cell_of(variable, OWN, division.replica_shard.shard_shape)

    def part(self, variable: keras.Variable) -> Any:
        """Returns this replica's part of a sharded variable."""
        return read(self._cell_of_shard(variable))

    def write(self, variable: keras.Variable, value: object) -> None:
        check_owner(variable, self.strategy)
        self.trace.has(variable)
        if self.is_sharded(variable):
            self._note_assignment(variable, self.trace.inside.whole)
            self._make_whole(variable)
        write(self._cell_of_value(variable), value)

    def write_shard(self, variable: keras.Variable, part: object) -> None:
        """Replaces this replica's part of a sharded variable."""
        self._note_assignment(variable, self.trace.inside.parts)
        write(self._cell_of_shard(variable), part)

    def everyone(self, nest: object) -> list[Any]:
        """Gathers a nest of every replica; only tensors need a collective."""
        leaves, structure = jax.tree.flatten(nest)
        gathered = [*map(self._gather, leaves)]
        return [
            structure.unflatten([values[i] for values in gathered])
            for i in range(self.count)
        ]

    def _gather(self, leaf: object) -> list[Any]:
        if not isinstance(leaf, jax.Array):
            return [leaf] * self.count
        components = [leaf]
        if self.count > 1:
            gathered = lax.all_gather(leaf, AXIS)
            components = [gathered[index] for index in range(self.count)]
        self._gathered[id(components[0])] = components, leaf
        return components

    def per_replica(self, values: Sequence[Any]) -> PerReplica:
        """Makes a per-replica value, with its local component if known."""
        components, local = self._gathered.get(id(values[0]), ([], None))
        if len(components) == len(values) and all(
            a is b for a, b in zip(components, values, strict=True)
        ):
            return Local(local, values)
        return PerReplica(values)

    def traced(self, value: Any) -> Any:
        """Makes a value one of which the compiler does not know the elements.

        It removes collectives of constants. But workers make programs of their
        own, and may have other constants, or none."""
        if not self.layout.is_global or np.size(value) > _MAY_BE_CONSTANT:
            return value
        value = jnp.asarray(value)
        return jnp.where(self.index >= 0, value, jnp.zeros_like(value))

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        """Combines gathered components by a collective, or returns `None`."""
        known = self.per_replica(values)
        if not isinstance(known, Local) or op not in _COLLECTIVES:
            return None
        local = widened(op, known.local)
        if op is ReduceOp.MEAN:
            local = ops.true_divide(local, 1)  # integers have a float mean
        return self.collective(op, self.traced(local))

    def collective(self, op: ReduceOp, nest: object) -> Any:
        """Combines a nest of every replica's tensors, by one collective."""
        # The compiler refuses some collectives of one replica whose logical
        # devices share the tensor.
        return nest if self.count == 1 else _COLLECTIVES[op](nest, AXIS)


class ReplicaTraceScope(TraceScope):
    """Cross-replica context in a replica function, during a rendezvous."""

    def everyone(self, value: Any) -> list[Any]:
        everyone: list[Any] = self.trace.everyone(value)
        return everyone

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        trace = self.trace
        if is_per_replica(variable):
            value = lax.select_n(
                trace.index,
                *[
                    jnp.asarray(share_of(variable, value, i, trace.count))
                    for i in range(trace.count)
                ],
            )
        trace.write(variable, value)


_COLLECTIVES = {
    ReduceOp.SUM: lax.psum,
    ReduceOp.MEAN: lax.pmean,
    ReduceOp.MIN: lax.pmin,
    ReduceOp.MAX: lax.pmax,
}


class TracedReplica(Replica):
    """Stands for every replica while one trace is made for all of them."""

    has_copies = False

    def __init__(self, trace: ReplicaTrace) -> None:
        super().__init__(trace.index, WHOLE)
        self._trace = trace

    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: object
    ) -> T:
        everyone = self._trace.everyone(value)
        with outside_replicas(), opened(self._trace.scope):
            return fn(everyone)

    def all_sum(self, what: str, value: object, total: object = None) -> Any:
        def add(replica: TracedReplica, value: object) -> Any:
            return replica.all_reduce(what, value) if total is None else total

        return summed_by(_traced_replica, what, add)(value)

    def all_reduce(self, what: str, value: object) -> Any:
        trace, layout = self._trace, self._trace.layout
        # The replicas of a worker are traced with one integer for all; workers
        # of one device each may have different ones.
        may_differ = layout.is_global and len(layout.devices) == 1
        if isinstance(value, int) and not may_differ:
            return value * trace.count
        return trace.collective(ReduceOp.SUM, trace.traced(value))

    def all_gather(self, what: str, value: object, axis: int) -> Any:
        along = check_gather([value] * self._trace.count, axis)
        if self._trace.count == 1:
            return value
        return lax.all_gather(value, AXIS, axis=along, tiled=True)

    def components_of(self, nest: object) -> Any:
        def pick(leaf: object) -> Any:
            if isinstance(leaf, Local):
                return leaf.local
            if not isinstance(leaf, PerReplica):
                return leaf
            return lax.dynamic_index_in_dim(
                jnp.stack(leaf.values), self._trace.index, keepdims=False
            )

        return map_nest(pick, nest)

    @property
    def seed_offset(self) -> Any:
        stride = jnp.uint32(SEED_STRIDE)
        return (self._trace.index.astype("uint32") * stride) % jnp.uint32(2**31)

    def read(self, variable: keras.Variable) -> Any:
        return self._trace.read(variable)

    def hold(self, variable: keras.Variable, value: object) -> Any:
        return value


def _traced_replica() -> TracedReplica:
    """Returns the replica that is traced in this thread."""
    trace = current_trace()
    assert trace is not None
    return TracedReplica(trace.of_replica)


class TracedRunner(ReplicaRunner):
    """The runner of all replicas, with the collectives of their rendezvous."""

    def __init__(self, trace: ReplicaTrace) -> None:
        self._trace = trace

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        raise UnsupportedModelError(
            "`strategy.extended.update` can't be part of a compiled function "
            "on JAX. Assign to the variable in `merge_call` instead, or run "
            "the function without `keras_dist.function`."
        )

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        return self.summed(gradients[0])

    def summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Sums each replica's own gradients."""
        traced = [self._trace.traced(g) for g in gradients if g is not None]
        sums = iter(self._trace.collective(ReduceOp.SUM, traced))
        return [None if g is None else next(sums) for g in gradients]

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        device = default_device(self._trace.layout.devices[0])
        with opened(None), eagerly(), device:
            yield


class TracedCall(ReplicaCall):
    """The one call of a replica function in a program, for all replicas."""

    replica: TracedReplica

    def __init__(self, trace: ReplicaTrace) -> None:
        strategy: Any = trace.strategy
        super().__init__(TracedReplica(trace), trace.runner, strategy)
        self._trace = trace

    def read(self, variable: keras.Variable) -> Any:
        return self._trace.read(variable)

    def write(self, variable: keras.Variable, value: object) -> None:
        self._trace.write(variable, value)

    def of_its_own(self, values: list[Any]) -> list[Any]:
        return OwnList(values)

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        return self.runner.sum_gradients(self.replica, gradients, [], variables)
