"""The body of a region: a replica function, traced for all devices."""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from keras_dist.core import context
from keras_dist.core.nests import map_nest
from keras_dist.plugin.front_end import RunsReplicas
from keras_dist_jax import agreement
from keras_dist_jax import keras_internals as internals
from keras_dist_jax import scans
from keras_dist_jax import shards
from keras_dist_jax.arguments import Argument
from keras_dist_jax.arguments import held_arrays
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.jaxprs import differing
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.layout import Layout
from keras_dist_jax.regions import Region
from keras_dist_jax.regions import TracedCall
from keras_dist_jax.segments import CUT
from keras_dist_jax.segments import ON_EACH
from keras_dist_jax.segments import RegionUpdates
from keras_dist_jax.segments import Segments
from keras_dist_jax.segments import over_replicas
from keras_dist_jax.sharded_steps import Sharding
from keras_dist_jax.shards import Shards
from keras_dist_jax.structure import ARRAY_TYPES
from keras_dist_jax.structure import check_constant
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import is_split


def run_region(
    strategy: RunsReplicas,
    layout: Layout,
    trace: Trace,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sharding: Sharding | None = None,
    scans: bool = False,
) -> Any:
    """Traces `fn` once for all replicas, as a part of a compiled function."""
    # With `scans`, arrays have an axis for steps in front, and `fn` is called
    # for each step.
    context.check_cross_replica(strategy, "run")
    arguments, held, leaves = held_arrays((tuple(args), dict(kwargs)), layout)
    known = [v for k, v in trace.variables.items() if k in trace.values]
    values = [trace.values[id(variable)] for variable in known]
    updates = None
    if sharding is not None and not trace.is_survey:
        updates = RegionUpdates(sharding)
    body = _Body(strategy, layout, trace, fn, arguments, held, known, updates)
    one = [leaf[0] for leaf in leaves] if scans else leaves
    traced = body.traced([*one, *values])
    if scans and not trace.is_survey:
        results, new = traced.scan(leaves, values, known)
    else:
        results, new = traced.run([*one, *values])
    for variable, value in zip(traced.replica.written, new, strict=True):
        trace.write(variable, value)
    joined = iter(results)

    def result(leaf: Any) -> Any:
        if leaf is not RESULT:
            return leaf
        value = next(joined)
        if layout.num_replicas == 1:
            return value[0]
        return JoinedPerReplica(value, True, layout)

    return map_nest(result, traced.replica.outline)


# A placeholder for an array in a replica function's result.
RESULT = object()


@dataclasses.dataclass(frozen=True)
class _ReplicaTrace:
    """A trace of a replica function: a program, and what it gives."""

    program: Any
    structure: Any
    outline: Any
    written: list[keras.Variable]


@dataclasses.dataclass(frozen=True)
class BodyTrace:
    """A replica function, traced for all devices."""

    mesh: Mesh
    specs: list[PartitionSpec]  # of its arguments: tensors, then variables
    replica: _ReplicaTrace
    is_mean: list[bool]  # for each variable that is no per-replica one
    segments: Segments | None = None  # `None`: one region runs all of it

    def run(self, arguments: list[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the function; returns results, and values of variables."""
        if self.segments is not None:
            atoms = opened(self.replica.program).outvars
            each, whole = self.segments.run(
                arguments, *self._divided(atoms), self.is_mean
            )
        else:
            each, whole = over_replicas(
                self.mesh, self._on_each_device, self.specs, (CUT, ON_EACH)
            )(arguments)
        count = len(each) + len(whole) - len(self.replica.written)
        return each[:count], [*each[count:], *whole]

    def _on_each_device(self, arguments: list[Any]) -> Any:
        program = self.replica.program
        found = jax.core.eval_jaxpr(opened(program), program.consts, *arguments)
        return agreement.given(*self._divided(found), self.is_mean)

    def _divided(self, found: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Divides what the program gives: each replica's own, and shared."""
        results, split, whole = self.replica.structure.unflatten(found)
        return [*results, *split], whole

    def scan(
        self,
        leaves: list[Any],
        values: list[Any],
        known: Sequence[keras.Variable],
    ) -> tuple[list[Any], list[Any]]:
        """Runs the function for one step after another; returns as `run`."""
        position = {id(v): i for i, v in enumerate(known)}
        written = [position[id(variable)] for variable in self.replica.written]

        def step(values: list[Any], leaves: list[Any]) -> Any:
            results, new = self.run([*leaves, *values])
            values = list(values)
            for index, value in zip(written, new, strict=True):
                values[index] = value
            return values, results

        values, results = lax.scan(step, values, leaves)
        # The axis for replicas is in front of that for steps.
        results = [jnp.swapaxes(result, 0, 1) for result in results]
        return results, [values[index] for index in written]


@dataclasses.dataclass(frozen=True)
class _Body:
    """A replica function, to be traced for all replicas at once."""

    strategy: RunsReplicas
    layout: Layout
    trace: Trace
    fn: Callable[..., Any]
    arguments: Any
    held: list[Argument]
    known: list[keras.Variable]
    updates: RegionUpdates | None

    def traced(self, arguments: list[Any]) -> BodyTrace:
        """Traces the function once, for all devices."""
        mesh = self.layout.whole.mesh
        specs = [CUT if each.is_cut else ON_EACH for each in self.held]
        for variable in self.known:
            own = self._in_parts(variable)
            cut = CUT if is_split(variable) else ON_EACH
            specs.append(cut if own is None else own.spec_in_regions)

        kept: list[_ReplicaTrace] = []

        def keep(arguments: list[Any]) -> tuple[()]:
            kept.append(self._replica(arguments))
            return ()

        jax.eval_shape(over_replicas(mesh, keep, specs, ()), arguments)
        (replica,) = kept
        # With one replica a worker, values are not per-replica ones, but they
        # still differ between workers.
        is_own = self.layout.is_wide and len(self.layout.devices) == 1
        is_cut = [argument.is_cut or is_own for argument in self.held]
        is_cut += [is_split(v) or bool(self._in_parts(v)) for v in self.known]
        several = self.layout.num_replicas > 1
        differ = [several and d for d in differing(replica.program, is_cut)]
        *_, whole_differs = replica.structure.unflatten(differ)
        whole = replica.written[len(replica.written) - len(whole_differs) :]
        is_mean = agreement.means_of(whole, whole_differs)
        segments = None
        if self.updates is not None:
            parts = [False] * len(self.held)
            parts += [bool(self._in_parts(v)) for v in self.known]
            segments = self.updates.segments(
                replica.program, mesh, specs, is_cut, parts
            )
        return BodyTrace(mesh, specs, replica, is_mean, segments)

    def _replica(self, arguments: list[Any]) -> _ReplicaTrace:
        leaves = arguments[: len(self.held)]
        values = arguments[len(self.held) :]
        kept: list[Any] = []

        def replica(leaves: list[Any], values: list[Any]) -> Any:
            whole, parts = {}, {}
            for variable, value in zip(self.known, values, strict=True):
                own = self._in_parts(variable)
                if own is not None:
                    parts[id(variable)] = own, value
                else:
                    is_own = is_split(variable)
                    whole[id(variable)] = value[0] if is_own else value
            region = Region(
                self.strategy,
                self.layout,
                self.trace,
                whole,
                self.updates,
                parts,
            )
            outline, results = self._called(region, leaves)
            written = list(region.written.values())
            written.sort(key=is_split, reverse=True)
            kept[:] = outline, written
            count = sum(map(is_split, written))
            values = [
                # Other dtypes would need traces of their own.
                lax.convert_element_type(region.values[id(v)], v.dtype)
                for v in written
            ]
            return results, values[:count], values[count:]

        program, shapes = jax.make_jaxpr(replica, return_shape=True)(
            leaves, values
        )
        outline, written = kept
        return _ReplicaTrace(
            program, jax.tree.structure(shapes), outline, written
        )

    def _in_parts(self, variable: keras.Variable) -> Shards | None:
        """Returns how a region gathers a variable; `None` if it has it all."""
        if self.updates is None or not shards.is_sharded(variable):
            return None
        own = shards.shards_of(variable)
        return None if own.spec_in_regions is None else own

    def _divisible(self) -> Callable[..., Any]:
        """Returns the function, with operations that logical devices divide."""
        devices = self.layout.holders
        if self.layout.num_logical > 1 and devices[0].platform == "tpu":
            return internals.with_divided_attention(self.fn)
        return self.fn

    def _called(
        self, region: Region, leaves: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Calls the function in a region; returns its outline and tensors."""
        own = iter(leaves)

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, Argument):
                return leaf
            return leaf.of_replica(next(own))

        args, kwargs = map_nest(argument, self.arguments)
        results: list[Any] = []

        def keep(leaf: Any) -> Any:
            if isinstance(leaf, keras.Variable):
                leaf = leaf.value
            if not isinstance(leaf, ARRAY_TYPES):
                check_constant(leaf)
                return leaf
            results.append(jnp.asarray(leaf))
            return RESULT

        noting = contextlib.nullcontext()
        if self.updates is not None:
            noting = scans.noting()
        with noting, region.current(), TracedCall(region) as call:
            outline = map_nest(keep, self._divisible()(*args, **kwargs))
            call.replica.meet(
                "the end of the replica function",
                lambda everyone: call.commit(everyone, []),
                call.writes,
            )
            return outline, results
