"""Gradients as one partial sum for each replica.

A program over several devices has one gradient of each variable: where the
rows of a batch are contracted, the compiler adds up the devices' shares of it,
on all devices. A device that needs only its part of the sum can have that for
half of the traffic, but not every platform's compiler finds that out.

So a program is evaluated equation by equation. At the update, each gradient is
followed back to the equations that add up over rows, such as the product of a
layer's inputs and the gradient of its outputs. These are computed again for
the rows of each device, and stay one value a device.

Axes of rows are guessed by their size. A wrong guess changes the traffic, and
not the result: the sum of the sums of any equal shares is the sum.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from keras_dist_jax.lockstep import bound

AXIS = "replica"
_CALLS = ("jit", "pjit")
# Linear functions of one operand that are linear with any parameters.
_LINEAR = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "neg",
    "reduce_sum",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "transpose",
)
_SUMS = ("add", "add_any", "sub")


class Node:
    """A value of a program, and the equation that it comes from.

    `value` is a `jax.Array` or a tracer. `equation` is `None` for arguments and
    constants of the program; `inputs` are the nodes of the equation's operands.
    """

    __slots__ = ("equation", "inputs", "value")

    def __init__(
        self, value: Any, equation: Any = None, inputs: Sequence["Node"] = ()
    ) -> None:
        self.value = value
        self.equation = equation
        self.inputs = inputs


Replaced = Callable[[Any, list[Node]], "list[Any] | None"]


def evaluate(
    closed: Any, arguments: Sequence[Any], replaced: Replaced
) -> list[Any]:
    """Runs a program, with other results in place of some of its calls.

    `replaced` takes an equation that calls a function, and the nodes of its
    operands. It returns the list of results, or `None` to go through the
    function.
    """
    nodes = _nodes(closed, [Node(value) for value in arguments], replaced)
    return [node.value for node in nodes]


def _nodes(closed: Any, arguments: list[Node], replaced: Replaced) -> Any:
    jaxpr = closed.jaxpr
    nodes = dict(zip(jaxpr.invars, arguments, strict=True))
    nodes.update(zip(jaxpr.constvars, map(Node, closed.consts), strict=True))

    def read(atom: Any) -> Node:
        return Node(atom.val) if isinstance(atom, Literal) else nodes[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if _is_call(equation):
            results = replaced(equation, inputs)
            found = (
                _nodes(equation.params["jaxpr"], inputs, replaced)
                if results is None
                else map(Node, results)
            )
        else:
            results = bound(equation, [node.value for node in inputs])
            found = [Node(value, equation, inputs) for value in results]
        nodes.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_call(equation: Any) -> bool:
    if equation.primitive.name not in _CALLS:
        return False
    params = equation.params
    asked = (*params["in_shardings"], *params["out_shardings"])
    return not any(isinstance(each, jax.sharding.Sharding) for each in asked)


class PartialSums:
    """Values of a program as sums of one term for each device.

    `num_rows` is the number of rows of the batch, which is cut over the mesh.
    """

    def __init__(self, mesh: Mesh, num_rows: int) -> None:
        self._mesh = mesh
        self._num_parts = mesh.size
        self._num_rows = num_rows
        self._found: dict[int, tuple[Any, Any]] = {}

    def of(self, node: Node) -> tuple[Any, Any]:
        """Splits a value into a term for each device, and a rest.

        Returns:
            Tuple of an array and a rest, either of which may be `None`. The
            array has an axis in front, which is cut over the devices and to be
            added up. The rest has the value's shape, and is to be added to that
            sum.
        """
        # The node is kept alive, so that no other one gets its id.
        key = id(node)
        if key not in self._found:
            self._found[key] = (node, self._of(node))
        found: tuple[Any, Any] = self._found[key][1]
        return found

    def _of(self, node: Node) -> tuple[Any, Any]:
        stack, rest = None, None
        if node.equation is not None:
            name = node.equation.primitive.name
            if (axes := self._contracted(node)) is not None:
                stack = self._by_device(node, axes)
            elif name in _SUMS:
                stack, rest = self._sum(node)
            elif name in _LINEAR:
                stack, rest = self._linear(node, 0)
            elif name in ("mul", "div"):
                stack, rest = self._linear(node, 0)
                if stack is None and name == "mul":
                    stack, rest = self._linear(node, 1)
        return (None, node.value) if stack is None else (stack, rest)

    def _sum(self, node: Node) -> tuple[Any, Any]:
        pairs = [self.of(each) for each in node.inputs]
        if node.equation.primitive.name == "sub":
            stack, rest = pairs[1]
            pairs[1] = (
                None if stack is None else -stack,
                None if rest is None else -rest,
            )
        stack, rest = map(_added, zip(*pairs, strict=True))
        return stack, rest

    def _linear(self, node: Node, index: int) -> tuple[Any, Any]:
        equation, inputs = node.equation, node.inputs
        if not (_is_float(node.value) and _is_float(inputs[index].value)):
            return None, None
        stack, rest = self.of(inputs[index])
        if stack is None:
            return None, None

        def apply(value: Any) -> Any:
            values = [each.value for each in inputs]
            values[index] = value
            return bound(equation, values)[0]

        return jax.vmap(apply)(stack), None if rest is None else apply(rest)

    def _contracted(self, node: Node) -> tuple[int | None, ...] | None:
        """Returns each operand's axis of rows, if an equation adds up rows."""
        rule = _CONTRACTIONS.get(node.equation.primitive.name)
        if rule is None or not _is_float(node.value):
            return None
        params, inputs = node.equation.params, node.inputs
        shapes = [jnp.shape(each.value) for each in inputs]
        choices = [
            axes
            for axes in rule(params, shapes)
            if self._may_be_rows(_size(shapes, axes))
        ]
        exact = [
            axes for axes in choices if _size(shapes, axes) == self._num_rows
        ]
        return next(iter([*exact, *choices]), None)

    def _may_be_rows(self, size: int) -> bool:
        # The axis may combine rows and, for example, steps in time.
        return size % self._num_rows == 0 and size % self._num_parts == 0

    def _by_device(self, node: Node, axes: tuple[int | None, ...]) -> Any:
        equation = node.equation
        scatters = equation.primitive.name.startswith("scatter")

        def local(*values: Any) -> Any:
            if scatters:  # the operand must be in one device's term only
                first = lax.axis_index(AXIS) == 0
                values = (jnp.where(first, values[0], 0), *values[1:])
            return bound(equation, values)[0][None]

        mapped = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=tuple(map(_spec, axes)),
            out_specs=PartitionSpec(AXIS),
            check_vma=False,
        )
        return mapped(*[each.value for each in node.inputs])


def _spec(axis: int | None) -> PartitionSpec:
    return (
        PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
    )


def _size(shapes: Any, axes: tuple[int | None, ...]) -> int:
    """Returns the size of the axis to cut, of the last operand that has it."""
    sizes = [s[a] for s, a in zip(shapes, axes, strict=True) if a is not None]
    return int(sizes[-1])


def _added(terms: Sequence[Any]) -> Any:
    present = [term for term in terms if term is not None]
    return sum(present[1:], present[0]) if present else None


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.inexact))


def _of_product(params: Any, shapes: Any) -> Any:
    (left, right), _ = params["dimension_numbers"]
    return sorted(zip(left, right, strict=True))


def _of_sum(params: Any, shapes: Any) -> Any:
    return [(axis,) for axis in sorted(params["axes"])]


def _of_convolution(params: Any, shapes: Any) -> Any:
    # In the gradient of a kernel, the feature axes are those of rows.
    if params["feature_group_count"] != 1:
        return []
    numbers = params["dimension_numbers"]
    return [(numbers.lhs_spec[1], numbers.rhs_spec[1])]


def _of_scatter(params: Any, shapes: Any) -> Any:
    numbers = params["dimension_numbers"]
    if numbers.operand_batching_dims:
        return []
    window = numbers.update_window_dims
    of_updates = [a for a in range(len(shapes[2])) if a not in window]
    return [(None, axis, own) for axis, own in enumerate(of_updates)]


_CONTRACTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "dot_general": _of_product,
    "reduce_sum": _of_sum,
    "conv_general_dilated": _of_convolution,
    "scatter-add": _of_scatter,
}
