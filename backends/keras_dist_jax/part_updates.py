"""Updates of optimizers whose state is cut over the replicas."""

import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from keras_dist.core.packing import in_packs
from keras_dist.core.packing import packs
from keras_dist.core.packing import places
from keras_dist.sharding.parts import Parts
from keras_dist.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist.sharding.supported import rate_now
from keras_dist.sharding.supported import settings_text
from keras_dist_jax import cut
from keras_dist_jax.layout import Layout
from keras_dist_jax.partial_sums import AXIS
from keras_dist_jax.partial_sums import Node
from keras_dist_jax.partial_sums import PartialSums
from keras_dist_jax.tracing import eagerly

_CUT = PartitionSpec(AXIS)
_WHOLE = PartitionSpec()
_numbers = itertools.count()
# The attribute of an optimizer that keeps its update.
_UPDATE = "_keras_dist_part_update"


class PartUpdate:
    """An update of each part of the variables on its own device.

    Gradients that are sums over the devices are added up in one
    reduce-scatter for each dtype, and the new variables are put together in
    one all-gather for each dtype.

    Attributes:
        name: String, the unique name of the update in programs.
        sharded: The `ShardedOptimizer`.
    """

    def __init__(self, sharded: ShardedOptimizer, layout: Layout) -> None:
        self.name = f"update_of_parts_{next(_numbers)}"
        self.sharded = sharded
        self._layout = layout
        self._mesh = layout.whole.mesh
        self._specs = [
            _CUT if sharded.is_sharded(position) else _WHOLE
            for position in range(len(sharded.variables))
        ]
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def is_of(self, optimizer: Any, layout: Layout) -> bool:
        """Tells whether the update still fits the optimizer and the layout."""
        return layout is self._layout and self.sharded.is_of(optimizer)

    def __call__(
        self,
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        values: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Updates once, in a program that is being traced.

        `gradients` has the gradient of each variable, or `None`, `parameters`
        the variables' values. The optimizer's `values` are flat and cut over
        the devices where they are sharded, else whole.

        Returns:
            The new parameters, whole, and the new values, in the form of the
            old.
        """
        # A new function for each trace: JAX would reuse the trace of a known
        # one, with the tracers that it has left behind.
        results: tuple[list[Any], list[Any]] = self._program()(
            list(gradients), list(parameters), list(values)
        )
        return results

    def eagerly(
        self,
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        values: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Updates once, with arrays; whole ones are those of this worker."""
        layout = self._layout

        def widened(array: Any) -> Any:
            if array is None or not array.is_fully_addressable:
                return array
            return layout.widen(layout.place(array))

        # A schedule, or a function of the user's, is evaluated at each update.
        sharded = self.sharded
        rate = rate_now(sharded.optimizer)
        key = settings_text(sharded.optimizer, sharded.trainable_variables)
        if key not in self._compiled:
            self._compiled[key] = self._program()
        new, kept = self._compiled[key](
            [*map(widened, gradients)],
            [*map(widened, parameters)],
            [
                widened(value) if spec is _WHOLE else value
                for value, spec in zip(
                    values, self._specs[: len(values)], strict=True
                )
            ],
            None if rate is None else np.asarray(rate, "float32"),
        )
        return [*map(layout.narrow, new)], [*map(layout.narrow, kept)]

    def with_sums(
        self, nodes: Sequence[Node], sums: PartialSums
    ) -> list[Any] | None:
        """Runs the update in place of its call in a program that is evaluated.

        `nodes` has the `Node` of each argument of the call; `sums` splits
        gradients into one partial sum for each device.

        Returns:
            List of all results, or `None` if the call has other arguments.
        """
        num_variables = len(self.sharded.parts)
        num_values = len(nodes) - 2 * num_variables
        if num_values not in self._lengths:
            return None
        gradients = nodes[:num_variables]
        pairs = [sums.of(node) for node in gradients]
        stacks, rests = map(list, zip(*pairs, strict=True))
        others = [node.value for node in nodes[num_variables:]]
        results = self._run(
            stacks, rests, others[:num_variables], others[num_variables:]
        )
        return list(jax.tree.leaves(results))

    @property
    def _lengths(self) -> tuple[int, int]:
        sharded = self.sharded
        return len(sharded.optimizer.variables), len(sharded.variables)

    def _program(self) -> Callable[..., Any]:
        def update(
            gradients: Any, parameters: Any, values: Any, rate: Any = None
        ) -> Any:
            nothing = [None] * len(gradients)
            with self.sharded.at_rate(rate):
                return self._run(nothing, gradients, parameters, values)

        update.__name__ = update.__qualname__ = self.name
        compiled: Callable[..., Any] = jax.jit(update)
        return compiled

    def _run(
        self,
        stacks: list[Any],
        rests: list[Any],
        parameters: list[Any],
        values: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        specs = self._specs[: len(values)]
        mapped = jax.shard_map(
            self._on_each,
            mesh=self._mesh,
            in_specs=(_CUT, _WHOLE, _WHOLE, specs),
            out_specs=(_WHOLE, specs),
            check_vma=False,
        )
        new, values = mapped(stacks, rests, parameters, values)
        given = [
            stack is not None or rest is not None
            for stack, rest in zip(stacks, rests, strict=True)
        ]
        new = [
            self.sharded.constrain(index, value) if given[index] else value
            for index, value in enumerate(new)
        ]
        return new, values

    def _on_each(
        self,
        stacks: list[Any],
        rests: list[Any],
        parameters: list[Any],
        values: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Updates the parts of one device."""
        parts = self.sharded.parts
        place = lax.axis_index(AXIS)

        def own(cut: Parts, whole: Any) -> Any:
            return None if whole is None else cut.split(whole)[place]

        summed = _in_one(
            [
                None if stack is None else cut.split(stack[0])
                for cut, stack in zip(parts, stacks, strict=True)
            ],
            functools.partial(
                lax.psum_scatter, axis_name=AXIS, scatter_dimension=0
            ),
        )
        gradients = [
            _added(total, own(cut, rest))
            for cut, total, rest in zip(parts, summed, rests, strict=True)
        ]
        new, values = self.sharded.stateless_apply(
            values,
            gradients,
            list(map(own, parts, parameters)),
            lambda amounts: list(lax.psum(amounts, AXIS)),
        )
        everyones = _in_one(
            new, functools.partial(lax.all_gather, axis_name=AXIS)
        )
        whole = [
            cut.join(value) for cut, value in zip(parts, everyones, strict=True)
        ]
        return whole, values


def part_update_of(optimizer: Any, layout: Layout) -> PartUpdate:
    """Returns the update of a built optimizer, whose state it cuts.

    Raises:
        UnsupportedModelError: If the optimizer needs whole variables.
    """
    kept: _Kept | None = vars(optimizer).get(_UPDATE)
    if kept is not None and kept.update.is_of(optimizer, layout):
        return kept.update
    with eagerly():
        sharded = ShardedOptimizer(optimizer, layout.num_replicas)
        for position, variable in enumerate(sharded.variables):
            if sharded.is_sharded(position):
                cut.cut(variable, layout)
    update = PartUpdate(sharded, layout)
    vars(optimizer)[_UPDATE] = _Kept(update)
    return update


class _Kept:
    """A holder of an optimizer's update, which copies of the optimizer lack."""

    def __init__(self, update: PartUpdate) -> None:
        self.update = update

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _added(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _in_one(values: Sequence[Any], meet: Callable[[Any], Any]) -> list[Any]:
    """Puts values through one collective for each dtype.

    The values, without those that are `None`, are concatenated along their last
    axis, which `meet` leaves as it is.
    """

    def met(pack: list[Any]) -> list[Any]:
        if pack[0] is None:
            return pack
        joined = meet(jnp.concatenate(pack, axis=-1))
        sizes = [value.shape[-1] for value in pack]
        return [joined[..., place] for place in places(sizes)]

    dtypes = [None if value is None else value.dtype for value in values]
    return in_packs(met, packs(dtypes), values)
