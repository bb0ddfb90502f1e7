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
from keras_dist_jax.jaxprs import AXIS
from keras_dist_jax.jaxprs import differing
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.layout import Layout
from keras_dist_jax.part_updates import PartUpdates
from keras_dist_jax.regions import Region
from keras_dist_jax.regions import TracedCall
from keras_dist_jax.regions import TracedRunner
from keras_dist_jax.sharded_steps import Sharding
from keras_dist_jax.shards import Shards
from keras_dist_jax.structure import ARRAY_TYPES
from keras_dist_jax.structure import check_constant
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import is_split

CUT, ON_EACH = PartitionSpec(AXIS), PartitionSpec()


def over_replicas(
    mesh: Mesh, fn: Callable[[list[Any]], Any], takes: Any, gives: Any
) -> Callable[[list[Any]], Any]:
    """Makes a function run for each replica, with its own arguments."""
    # The compiler divides what is along the other axes of the mesh.
    mapped: Callable[[list[Any]], Any] = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(takes,),
        out_specs=gives,
        axis_names={AXIS},
        check_vma=False,
    )
    return mapped


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
    if trace.is_survey:
        sharding = None
    body = _Body(strategy, layout, trace, fn, arguments, held, known, sharding)
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
    # First variables of which each replica has a value, then those of which it
    # has a part, as in `parts`, then those that replicas share.
    written: list[keras.Variable]
    parts: list[Shards]


@dataclasses.dataclass(frozen=True)
class BodyTrace:
    """A replica function, traced for all devices."""

    mesh: Mesh
    specs: list[PartitionSpec]  # of its arguments: tensors, then variables
    shards: list[Shards | None]  # of its arguments that replicas have parts of
    replica: _ReplicaTrace
    is_mean: list[bool]  # for each variable that replicas share

    def run(self, arguments: list[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the function; returns results, and values of variables."""
        given = [
            value if own is None else own.stored(value)
            for value, own in zip(arguments, self.shards, strict=True)
        ]
        parts = self.replica.parts
        each, divided, whole = over_replicas(
            self.mesh,
            self._on_each_device,
            self.specs,
            (CUT, [own.spec_in_regions for own in parts], ON_EACH),
        )(given)
        divided = [
            own.whole(array) for own, array in zip(parts, divided, strict=True)
        ]
        count = len(each) + len(parts) + len(whole) - len(self.replica.written)
        return each[:count], [*each[count:], *divided, *whole]

    def _on_each_device(self, arguments: list[Any]) -> Any:
        program = self.replica.program
        found = jax.core.eval_jaxpr(opened(program), program.consts, *arguments)
        results, split, parts, whole = self.replica.structure.unflatten(found)
        each = [jnp.asarray(value)[None] for value in (*results, *split)]
        return each, parts, agreement.averaged(whole, self.is_mean)

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
    sharding: Sharding | None

    def traced(self, arguments: list[Any]) -> BodyTrace:
        """Traces the function once, for all devices."""
        mesh = self.layout.whole.mesh
        divided = [None] * len(self.held) + [*map(self._in_parts, self.known)]
        specs = [CUT if each.is_cut else ON_EACH for each in self.held]
        specs += [CUT if is_split(v) else ON_EACH for v in self.known]
        specs = [
            spec if own is None else own.spec_in_regions
            for spec, own in zip(specs, divided, strict=True)
        ]
        given = [
            value if own is None else own.stored(value)
            for value, own in zip(arguments, divided, strict=True)
        ]
        kept: list[_ReplicaTrace] = []

        def keep(arguments: list[Any]) -> tuple[()]:
            kept.append(self._replica(arguments))
            return ()

        jax.eval_shape(over_replicas(mesh, keep, specs, ()), given)
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
        return BodyTrace(mesh, specs, divided, replica, is_mean)

    def _replica(self, arguments: list[Any]) -> _ReplicaTrace:
        leaves = arguments[: len(self.held)]
        values = arguments[len(self.held) :]
        kept: list[Any] = []

        def replica(leaves: list[Any], values: list[Any]) -> Any:
            whole, parts = {}, {}
            for variable, value in zip(self.known, values, strict=True):
                if self._in_parts(variable) is not None:
                    parts[id(variable)] = value
                else:
                    is_own = is_split(variable)
                    whole[id(variable)] = value[0] if is_own else value
            region = Region(
                self.strategy,
                self.layout,
                self.trace,
                whole,
                parts,
                self._runner,
            )
            outline, results = self._called(region, leaves)
            groups: list[list[keras.Variable]] = [[], [], []]
            for variable in region.written.values():
                is_part = id(variable) in region.parts
                groups[0 if is_split(variable) else 1 if is_part else 2].append(
                    variable
                )
            kept[:] = outline, groups
            split, divided, shared = groups
            # Other dtypes would need traces of their own.
            return results, *[
                [lax.convert_element_type(of[id(v)], v.dtype) for v in group]
                for of, group in (
                    (region.values, split),
                    (region.parts, divided),
                    (region.values, shared),
                )
            ]

        program, shapes = jax.make_jaxpr(replica, return_shape=True)(
            leaves, values
        )
        outline, groups = kept
        return _ReplicaTrace(
            program,
            jax.tree.structure(shapes),
            outline,
            [variable for group in groups for variable in group],
            [*map(shards.shards_of, groups[1])],
        )

    def _runner(self, region: Region) -> TracedRunner:
        if self.sharding is None:
            return TracedRunner(region)
        return PartUpdates(region, self.sharding)

    def _in_parts(self, variable: keras.Variable) -> Shards | None:
        """Returns how replicas divide a variable; `None` if each has it all."""
        if self.sharding is None or not shards.is_sharded(variable):
            return None
        own = shards.shards_of(variable)
        return own if own.is_over_replicas else None

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
        if self.sharding is not None:
            noting = scans.noting()
        with noting, region.current(), TracedCall(region) as call:
            outline = map_nest(keep, self._divisible()(*args, **kwargs))
            call.replica.meet(
                "the end of the replica function",
                lambda everyone: call.commit(everyone, []),
                call.writes,
            )
            return outline, results
