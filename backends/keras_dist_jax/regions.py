"""`strategy.run` inside of a program: one body that all replicas run."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp
from keras import ops

from keras_dist.core.nests import map_nest
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import check_gather
from keras_dist.core.reduction import widened
from keras_dist.core.rows import WHOLE
from keras_dist.core.rows import Share
from keras_dist.core.values import PerReplica
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals.keras_internals import opened
from keras_dist.plugin.front_end import RunsReplicas
from keras_dist.plugin.replica import SEED_STRIDE
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist.replica.adoption import check_owner
from keras_dist.replica.call import ReplicaCall
from keras_dist.replica.state import Writes
from keras_dist.replica.state import outside_replicas
from keras_dist_jax import scans
from keras_dist_jax import shards
from keras_dist_jax.agreement import OwnList
from keras_dist_jax.agreement import OwnWrites
from keras_dist_jax.control_flow import summed_by
from keras_dist_jax.jax_internals import tracing_with
from keras_dist_jax.jaxprs import AXIS
from keras_dist_jax.joined import Local
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import default_device
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import TraceScope
from keras_dist_jax.tracing import current_trace
from keras_dist_jax.tracing import eagerly
from keras_dist_jax.tracing import is_split
from keras_dist_jax.tracing import share_of

T = TypeVar("T")
# Most elements of a value that the compiler may know, such as a sum of no rows.
_MAY_BE_CONSTANT = 2**16


class Region:
    """The variables that one replica reads and writes in a region's body."""

    def __init__(
        self,
        strategy: RunsReplicas,
        layout: Layout,
        trace: Trace,
        values: Mapping[int, Any],
        parts: Mapping[int, Any],
        runner: Callable[["Region"], "TracedRunner"],
    ) -> None:
        self.strategy = strategy
        self.layout = layout
        self.trace = trace
        self.count = layout.num_replicas
        self.index = lax.axis_index(AXIS)
        self.values = dict(values)
        # By id of a sharded variable: this replica's part.
        self.parts = dict(parts)
        self.written: dict[int, keras.Variable] = {}
        self.scope = RegionScope(self)
        self.runner = runner(self)
        self.branches = trace.branches
        # By the id of the first component of a gathered value: all components,
        # and this replica's own.
        self._gathered: dict[int, tuple[list[Any], Any]] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes this the current region of its trace, while open."""
        before, self.trace.region = self.trace.region, self
        try:
            yield
        finally:
            self.trace.region = before

    def read(self, variable: keras.Variable) -> Any:
        """Returns a variable's value on the replica, or `None` without one."""
        check_owner(variable, self.strategy)
        key = id(variable)
        if key not in self.values and key in self.parts:
            own, part = shards.shards_of(variable), self.parts[key]
            self.trace.variables[key] = variable
            if scans.gathers_again():
                return own.gathered(part)
            with tracing_with(part):
                self.values[key] = own.gathered(part)
        if key not in self.values:
            value = self.trace.read(variable)
            if value is None:
                return None
            if is_split(variable):
                value = lax.dynamic_index_in_dim(
                    value, self.index, keepdims=False
                )
            elif shards.is_sharded(variable) and key not in self.trace.values:
                return value
            elif not isinstance(value, jax.core.Tracer):
                # A body can't take arrays of several devices. One shard is
                # enough: a trace that meets an unknown variable is discarded.
                value = value.addressable_shards[0].data
            self.values[key] = value
        self.trace.variables[key] = variable
        return self.values[key]

    def is_in_parts(self, variable: keras.Variable) -> bool:
        """Tells whether a read gathers the parts of all replicas."""
        return id(variable) in self.parts

    def write(self, variable: keras.Variable, value: Any) -> None:
        check_owner(variable, self.strategy)
        self.parts.pop(id(variable), None)
        self.values[id(variable)] = value
        self.written[id(variable)] = variable

    def write_part(self, variable: keras.Variable, part: Any) -> None:
        """Replaces this replica's part of a sharded variable."""
        self.parts[id(variable)] = part
        self.values.pop(id(variable), None)
        self.written[id(variable)] = variable

    def everyone(self, nest: Any) -> list[Any]:
        """Gathers a nest of every replica; only tensors need a collective."""
        leaves, structure = jax.tree.flatten(nest)
        gathered = [*map(self._gather, leaves)]
        return [
            structure.unflatten([each[i] for each in gathered])
            for i in range(self.count)
        ]

    def _gather(self, leaf: Any) -> list[Any]:
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
        if not self.layout.is_wide or np.size(value) > _MAY_BE_CONSTANT:
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

    def collective(self, op: ReduceOp, nest: Any) -> Any:
        """Combines a nest of every replica's tensors, by one collective."""
        # The compiler refuses some collectives of one replica whose logical
        # devices share the tensor.
        return nest if self.count == 1 else _COLLECTIVES[op](nest, AXIS)


class RegionScope(TraceScope):
    """Cross-replica context inside of a region, during a rendezvous."""

    def everyone(self, value: Any) -> list[Any]:
        everyone: list[Any] = self.trace.everyone(value)
        return everyone

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        region = self.trace
        if region.trace.branches > region.branches:
            raise UnsupportedModelError(
                "Replicas can't write a variable together in a branch of a "
                f"compiled function. Received: variable '{variable.path}', "
                "written in `cond` by an optimizer, `merge_call` or an "
                "assignment that is aggregated. Expected: such writes "
                "outside of control flow. Choose the value with "
                "`keras.ops.where`, and apply it in every step."
            )
        if is_split(variable):
            value = lax.select_n(
                region.index,
                *[
                    jnp.asarray(share_of(variable, value, i, region.count))
                    for i in range(region.count)
                ],
            )
        region.write(variable, value)


_COLLECTIVES = {
    ReduceOp.SUM: lax.psum,
    ReduceOp.MEAN: lax.pmean,
    ReduceOp.MIN: lax.pmin,
    ReduceOp.MAX: lax.pmax,
}


class TracedReplica(Replica):
    """Stands for every replica while one trace is made for all of them."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.index, WHOLE)
        self._region = region

    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        everyone = self._region.everyone(value)
        with outside_replicas(), opened(self._region.scope):
            return fn(everyone)

    def all_sum(self, what: str, value: Any, total: Any = None) -> Any:
        def add(replica: TracedReplica, value: Any) -> Any:
            if total is not None:
                return total
            region = replica._region
            return region.collective(ReduceOp.SUM, region.traced(value))

        return summed_by(_traced_replica, what, add)(value)

    def all_gather(self, what: str, value: Any, axis: int) -> Any:
        along = check_gather([value] * self._region.count, axis)
        if self._region.count == 1:
            return value
        return lax.all_gather(value, AXIS, axis=along, tiled=True)

    def own(self, nest: Any) -> Any:
        def pick(leaf: Any) -> Any:
            if isinstance(leaf, Local):
                return leaf.local
            if not isinstance(leaf, PerReplica):
                return leaf
            return lax.dynamic_index_in_dim(
                jnp.stack(leaf.values), self._region.index, keepdims=False
            )

        return map_nest(pick, nest)

    @property
    def seed_offset(self) -> Any:
        stride = jnp.uint32(SEED_STRIDE)
        return (self._region.index.astype("uint32") * stride) % jnp.uint32(
            2**31
        )

    def read(self, variable: keras.Variable) -> Any:
        return self._region.read(variable)

    def hold(self, variable: keras.Variable, value: Any) -> Any:
        return value


def _traced_replica() -> TracedReplica:
    """Returns the replica that is traced in this thread."""
    trace = current_trace()
    assert trace is not None
    return TracedReplica(trace.region)


class TracedRunner(ReplicaRunner):
    """The runner of a region, with the collectives of its rendezvous."""

    def __init__(self, region: Region) -> None:
        self._region = region

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
    ) -> list[Any]:
        return self.summed(gradients[0])

    def summed(self, own: Sequence[Any]) -> list[Any]:
        """Sums each replica's own gradients."""
        traced = [self._region.traced(g) for g in own if g is not None]
        sums = iter(self._region.collective(ReduceOp.SUM, traced))
        return [None if g is None else next(sums) for g in own]

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        device = default_device(self._region.layout.devices[0])
        with opened(None), eagerly(), device:
            yield


class TracedCall(ReplicaCall):
    """The one call of a replica function in a region, for all replicas."""

    replica: TracedReplica

    def __init__(self, region: Region) -> None:
        strategy: Any = region.strategy
        super().__init__(TracedReplica(region), region.runner, strategy)
        self._region = region
        self.writes = OwnWrites()

    def read(self, variable: keras.Variable) -> Any:
        return self._region.read(variable)

    def write(self, variable: keras.Variable, value: Any) -> None:
        check_owner(variable, self.strategy)
        self.scope.state_mapping[id(variable)] = value
        self.writes[id(variable)] = (variable, value)

    def total(self, what: str, value: Any) -> Any:
        layout = self._region.layout
        if (
            isinstance(value, int)
            and layout.is_wide
            and len(layout.devices) == 1
        ):
            return lax.psum(self._region.traced(value), AXIS)
        return super().total(what, value)

    def of_its_own(self, values: list[Any]) -> list[Any]:
        return OwnList(values)

    def commit(self, writes: Sequence[Writes], shares: Sequence[Share]) -> None:
        for variable, value in writes[0].values():
            self._region.write(variable, value)

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        return self.runner.sum_gradients(self.replica, gradients, [], variables)
