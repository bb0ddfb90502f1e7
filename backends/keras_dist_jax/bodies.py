"""The body of a region: a replica function, traced for all devices."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import jax
import keras
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from keras_dist.core import context
from keras_dist.core.nests import map_nest
from keras_dist.core.values import PerReplica
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugin.front_end import keras_hooks
from keras_dist.plugin.replica import divergence
from keras_dist_jax.agreement import Peers
from keras_dist_jax.agreement import Record
from keras_dist_jax.agreement import Tensor
from keras_dist_jax.agreement import averaged
from keras_dist_jax.agreement import check_alike
from keras_dist_jax.agreement import in_order
from keras_dist_jax.agreement import means_of
from keras_dist_jax.divergence import differing
from keras_dist_jax.jaxprs import AXIS
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.joined import cut_to
from keras_dist_jax.joined import largest
from keras_dist_jax.joined import padded
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import Shapes
from keras_dist_jax.lockstep import Lockstep
from keras_dist_jax.regions import Region
from keras_dist_jax.regions import TracedCall
from keras_dist_jax.regions import TracedReplica
from keras_dist_jax.regions import TracedRunner
from keras_dist_jax.structure import ARRAY_TYPES
from keras_dist_jax.structure import check_constant
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import is_split

if TYPE_CHECKING:
    from keras_dist.plugin.front_end import RunsReplicas

CUT, ON_EACH = PartitionSpec(AXIS), PartitionSpec()
# For arrays whose first axis is for steps.
CUT_STEPS, ON_EACH_STEPS = PartitionSpec(None, AXIS), PartitionSpec()
_MAX_TRACES = 4


def run_region(
    strategy: "RunsReplicas",
    layout: Layout,
    trace: Trace,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scans: bool = False,
) -> Any:
    """Traces `fn` once for all replicas, as a part of a compiled function.

    Arguments have tracers for arrays. With `scans`, arrays have an axis for
    steps in front, and `fn` is called for each step.

    Returns:
        The nest that `fn` returns, with a `JoinedPerReplica` for each array;
        for one replica, with the array itself.
    """
    context.check_cross_replica(strategy, "run")
    keras_hooks().install()
    leaves: list[Any] = []
    specs: list[Any] = []
    cut, on_each = (CUT_STEPS, ON_EACH_STEPS) if scans else (CUT, ON_EACH)

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, JoinedPerReplica):
            leaf = leaf.in_a_program()
            leaves.append(leaf.joined)
            specs.append(cut)
            return _Argument(leaf.stacked, leaf.shapes)
        if isinstance(leaf, PerReplica):
            joined = JoinedPerReplica.of_traced(leaf.values, layout)
            leaves.append(joined.joined)
            specs.append(cut)
            return _Argument(True, joined.shapes)
        if isinstance(leaf, jax.Array):
            leaves.append(leaf)
            specs.append(on_each)
            return _Argument(False)
        return leaf

    arguments = map_nest(collect, (tuple(args), dict(kwargs)))
    known = [v for k, v in trace.variables.items() if k in trace.values]
    # With one replica a worker, values are not per-replica ones, but they
    # still differ between workers.
    is_own = layout.is_wide and len(layout.devices) == 1
    differ = [
        *[spec is cut or is_own for spec in specs],
        *[is_split(variable) for variable in known],
    ]
    body = _Body(strategy, layout, trace, fn, arguments, known, differ, scans)
    results, split, whole = jax.shard_map(
        body,
        mesh=layout.whole.mesh,
        in_specs=(specs, [CUT if is_split(v) else ON_EACH for v in known]),
        out_specs=(CUT, CUT, ON_EACH),
        check_vma=False,
    )(leaves, [trace.values[id(variable)] for variable in known])
    for variable, value in zip(body.written, [*split, *whole], strict=True):
        trace.write(variable, value)
    joined = iter(results)

    def result(leaf: Any) -> Any:
        if not isinstance(leaf, _Result):
            return leaf
        value = next(joined)
        if layout.num_replicas == 1:
            return value[0]
        return JoinedPerReplica(value, True, layout, None, leaf.shapes)

    return map_nest(result, body.result)


class _Argument:
    """A placeholder for an array among the arguments of a replica function."""

    def __init__(self, stacked: bool, shapes: Shapes | None = None) -> None:
        self.stacked = stacked
        self.shapes = shapes


class _Result(Tensor):
    """A placeholder for an array among the results of a replica function.

    `shapes` are those on each replica where they differ.
    """

    shapes: Shapes | None = None


class _Body:
    """The body of each device: the replica function, traced for all."""

    def __init__(
        self,
        strategy: "RunsReplicas",
        layout: Layout,
        trace: Trace,
        fn: Callable[..., Any],
        arguments: Any,
        known: Sequence[keras.Variable],
        differ: Sequence[bool],
        scans: bool,
    ) -> None:
        self._strategy = strategy
        self._layout = layout
        self._trace = trace
        self._fn = fn
        self._arguments = arguments
        self._known = known
        self._differ = differ
        self._scans = scans
        self.result: Any = None
        # The result of the first variant.
        self._of_first: Any = None
        self.written: list[keras.Variable] = []
        count = layout.num_replicas
        uneven: list[Shapes] = []
        map_nest(
            lambda leaf: (
                uneven.append(leaf.shapes)
                if isinstance(leaf, _Argument) and leaf.shapes
                else None
            ),
            arguments,
        )
        # A variant is a trace that serves all replicas whose arguments have
        # the same shapes.
        shapes = [tuple(s[i] for s in uneven) for i in range(count)]
        kinds = list(dict.fromkeys(shapes))
        self._variant_of = [kinds.index(each) for each in shapes]
        self._replica_of = [shapes.index(kind) for kind in kinds]

    def __call__(self, leaves: list[Any], values: list[Any]) -> Any:
        one = [leaf[0] for leaf in leaves] if self._scans else leaves
        step = self._step(one, values)
        if not self._scans:
            results, split, whole = step(leaves, values)
        elif self._trace.is_survey:
            results, split, whole = step(one, values)
        else:
            results, split, whole = self._scanned(step, leaves, values)
        return [jnp.asarray(x)[None] for x in results], split, whole

    def _scanned(
        self, step: Callable[..., Any], leaves: list[Any], values: list[Any]
    ) -> Any:
        position = {id(v): i for i, v in enumerate(self._known)}
        written = [position[id(variable)] for variable in self.written]

        def scanned(values: list[Any], leaves: list[Any]) -> Any:
            results, split, whole = step(leaves, values)
            values = list(values)
            for index, value in zip(written, [*split, *whole], strict=True):
                values[index] = value
            return values, results

        values, results = lax.scan(scanned, values, leaves)
        new = [values[index] for index in written]
        split = sum(map(is_split, self.written))
        return results, new[:split], new[split:]

    def _step(self, leaves: list[Any], values: list[Any]) -> Callable[..., Any]:
        """Traces all variants; returns a function that runs their programs."""
        programs, structure = self._traced(leaves, values)
        each = [differing(p.jaxpr, self._differ) for p in programs]
        differ = [any(own) for own in zip(*each, strict=True)]
        lockstep = None
        if len(programs) > 1:
            lockstep = Lockstep(programs)
            alike = lockstep.same_results()
            differ = [d or not a for d, a in zip(differ, alike, strict=True)]
        *_, whole_differs = structure.unflatten(differ)
        variables = self.written[len(self.written) - len(whole_differs) :]
        is_mean = means_of(variables, whole_differs)

        def run(leaves: list[Any], values: list[Any]) -> Any:
            flat = [*leaves, *values]
            if lockstep is None:
                program = programs[0]
                flat = jax.core.eval_jaxpr(program.jaxpr, program.consts, *flat)
            else:
                variants = jnp.asarray(self._variant_of)
                flat = lockstep.run(variants[lax.axis_index(AXIS)], flat)
            results, split, whole = structure.unflatten(flat)
            means = averaged(whole, is_mean)
            return results, [jnp.asarray(x)[None] for x in split], means

        return run

    def _traced(
        self, leaves: list[Any], values: list[Any]
    ) -> tuple[list[Any], Any]:
        assumed: list[Record] | None = None
        for _ in range(_MAX_TRACES):
            programs, records, written, outlines = [], [], [], []
            places = []
            for variant in range(len(self._replica_of)):
                peers = Peers(self._variant_of, variant, assumed)

                def replica(
                    leaves: list[Any],
                    values: list[Any],
                    variant: int = variant,
                    peers: Peers = peers,
                ) -> Any:
                    return self._replica(leaves, values, variant, peers)

                program, shapes = jax.make_jaxpr(replica, return_shape=True)(
                    leaves, values
                )
                programs.append(program)
                records.append(peers.record)
                written.append([id(variable) for variable in self.written])
                outlines.append(self.result)
                places.append(peers.places)
            check_alike(outlines)
            self._check_places(places)
            if any(each != written[0] for each in written):
                raise ReplicaDivergenceError(
                    "Replicas with different numbers of rows assigned "
                    "different variables. Expected: the same ones, in the "
                    "same order. Look for a branch on shapes."
                )
            if records == assumed or (
                assumed is None and all(r == records[0] for r in records)
            ):
                self.result = self._of_first
                return programs, jax.tree.structure(shapes)
            assumed = records
        raise ReplicaDivergenceError(
            "Replicas with different numbers of rows never agreed on what "
            "they meet for: the shapes of one depend on those of another, "
            "again and again. Expected: collectives of shapes that follow "
            "from the arguments'."
        )

    def _check_places(self, places: Sequence[Sequence[str]]) -> None:
        """Compares what the variants met for.

        Raises:
            ReplicaDivergenceError: If that differs.
        """
        # What JAX has traced before, in a `jax.jit` of the user's for instance,
        # has its collectives again, and leaves no place.
        if len(set(map(len, places))) > 1:
            return
        for meeting in zip(*places, strict=True):
            if len(set(meeting)) > 1:
                raise divergence([meeting[index] for index in self._variant_of])

    def _replica(
        self, leaves: list[Any], values: list[Any], variant: int, peers: Peers
    ) -> tuple[list[Any], list[Any], list[Any]]:
        region = Region(
            self._strategy,
            self._layout,
            self._trace,
            {
                id(variable): value[0] if is_split(variable) else value
                for variable, value in zip(self._known, values, strict=True)
            },
            peers,
        )
        own = iter(leaves)

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, _Argument):
                return leaf
            value = next(own)
            value = value[0] if leaf.stacked else value
            if leaf.shapes is None:
                return value
            return cut_to(value, leaf.shapes[self._replica_of[variant]])

        args, kwargs = map_nest(argument, self._arguments)
        results: list[Any] = []

        def keep(leaf: Any) -> Any:
            if isinstance(leaf, keras.Variable):
                leaf = leaf.value
            if not isinstance(leaf, ARRAY_TYPES) and (
                not peers.are_uneven or not isinstance(leaf, (int, float))
            ):
                check_constant(leaf)
                return leaf
            results.append(jnp.asarray(leaf))
            return _Result(results[-1])

        replica = TracedReplica(region)
        runner = TracedRunner(region)
        with (
            region.current(),
            TracedCall(replica, runner, self._strategy, region) as call,
        ):
            nest = self._fn(*args, **kwargs)
            if variant:
                nest = in_order(nest, self._of_first)
            self.result = map_nest(keep, nest)
            self._of_first = self._of_first if variant else self.result
            replica.meet(
                "the end of the replica function",
                lambda everyone: call.commit(everyone, []),
                call.writes,
            )
            results = self._even(region, results)
        written = list(region.written.values())
        split = [v for v in written if is_split(v)]
        whole = [v for v in written if not is_split(v)]
        self.written = [*split, *whole]
        return (
            results,
            [_as_kept(v, region.values[id(v)]) for v in split],
            [_as_kept(v, region.values[id(v)]) for v in whole],
        )

    def _even(self, region: Region, results: list[Any]) -> list[Any]:
        """Pads results to one shape on all replicas; notes their own shapes."""
        if not region.peers.are_uneven:
            return results
        everyone = region.everyone([tuple(map(int, x.shape)) for x in results])
        columns = iter(list(zip(*everyone, strict=True)))
        rest = iter(results)
        even: list[Any] = []

        def make_even(leaf: Any) -> Any:
            if isinstance(leaf, _Result):
                shapes, value = next(columns), next(rest)
                if len(set(shapes)) > 1:
                    leaf.shapes = tuple(shapes)
                    value = padded(value, largest(shapes))
                even.append(value)
            return leaf

        map_nest(make_even, self.result)
        return even


def _as_kept(variable: keras.Variable, value: Any) -> Any:
    """Casts a value to its variable's dtype, to avoid traces for another."""
    return lax.convert_element_type(value, variable.dtype)
