"""Calls a layer again, on rows that are made up, and undoes the call."""

import contextlib
import warnings
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops
from keras import tree

from keras_dist.core.rows import Share
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.internals.keras_internals import LayerCall
from keras_dist.internals.keras_internals import opened
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.draws import Draw
from keras_dist.plugin.draws import Drawer
from keras_dist.plugin.draws import drawn_by
from keras_dist.plugin.draws import rows_at
from keras_dist.plugin.randomness import kept_random_state
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import outside_replicas
from keras_dist.replica.sums import Found
from keras_dist.replica.sums import Kind
from keras_dist.replica.sums import kind_of


@contextlib.contextmanager
def kept_attributes(layer: keras.Layer) -> Iterator[None]:
    """Restores attributes of a layer and its sublayers at the end."""
    before = [(vars(x), _copy(vars(x))) for x in layer._flatten_layers()]
    try:
        yield
    finally:
        for attributes, (values, contents) in before:
            attributes.clear()
            attributes.update(values)
            for container, content in contents:
                _restore(container, content)


# Pairs of a list, dict or set and a copy of it.
_Contents = list[tuple[Any, Any]]


def _copy(attributes: dict[str, Any]) -> tuple[dict[str, Any], _Contents]:
    contents: _Contents = [
        (value, kind(value))
        for value in attributes.values()
        for kind in (list, dict, set)
        if isinstance(value, kind)
    ]
    return dict(attributes), contents


def _restore(container: Any, content: Any) -> None:
    """Restores a container's content without Keras' tracking of changes."""
    if isinstance(container, list):
        if not _are_same(container, content):
            list.__setitem__(container, slice(None), content)
        return
    if isinstance(container, dict) and _are_same(
        container.values(), content.values()
    ):
        return
    kind = dict if isinstance(container, dict) else set
    kind.clear(container)
    kind.update(container, content)


def _are_same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(
        one is other for one, other in zip(ones, others, strict=True)
    )


FEW_ROWS, _MANY_ROWS = 4, 64


@dataclass(frozen=True)
class Attempt:
    """The arguments and variables with which a layer is called again."""

    # Other values of variables: zeros may switch off parts.
    shift: bool
    own: bool = False  # the replica's own rows, repeated
    positive: bool = False  # made-up numbers between 0 and 1
    size: int = 8  # of axes whose length the data decides


# The first is nearly always enough. Variables' own values may hide a part.
_MADE_UP = (
    Attempt(shift=True),
    Attempt(shift=False),
    Attempt(shift=True, positive=True, size=32),
)
# Made-up numbers may be invalid for a layer, such as a label of no class.
_OWN = (Attempt(shift=True, own=True), Attempt(shift=False, own=True))


class ProbeScope(keras.StatelessScope):
    """A scope that keeps what a layer adds as losses and assigns."""

    def __init__(
        self,
        step: ReplicaStep,
        call: LayerCall,
        shift: bool,
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._step = step
        self._layer = call.layer
        self._shift = shift
        self.terms: list[Any] = []
        self.assigned: dict[int, tuple[Any, Any]] = {}
        self.alike: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self._value_of(variable)
            self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if id(variable) not in self.assigned:
            before = self.get_current_value(variable)
            self.assigned[id(variable)] = variable, before
        self.state_mapping[id(variable)] = value

    def note(self, loss: Any) -> None:
        """Keeps losses of the probed layer, not of layers that it calls."""
        call = keras_internals.innermost_call()
        if call is not None and call.layer is self._layer:
            self.terms += tree.flatten(loss)

    def same_on_all(self, variables: Sequence[keras.Variable]) -> None:
        """Notes variables that each replica gives the same values."""
        self.alike.update(map(id, variables))

    def _value_of(self, variable: keras.Variable) -> Any:
        value = None
        if id(variable) not in self._step.writes:
            value = self._step.scope.get_current_value(variable)
        if value is None:
            value = keras_internals.value_of(variable)
        value = ops.convert_to_tensor(value)
        is_shifted = self._shift and not keras_random.is_seed(variable)
        return _shifted(value) if is_shifted else value


def _shifted(value: Any) -> Any:
    dtype = keras.backend.standardize_dtype(value.dtype)
    if keras.backend.is_float_dtype(dtype):
        rng = np.random.default_rng(5)
        by = rng.uniform(0.1, 1.0, tuple(value.shape))
        return value + ops.convert_to_tensor(by, dtype=dtype)
    return value + ops.cast(1, dtype) if "int" in dtype else value


def probe(step: ReplicaStep, call: LayerCall) -> Found:
    """Finds the kind of each loss and variable that a layer's call changes."""
    found = Found()
    # In a graph, rows have no values yet.
    own = () if keras_internals.in_tf_graph() else _OWN
    with nothing_kept(step, call.layer):
        for attempt in (*own, *_MADE_UP):
            try:
                found.add(_compare(step, call, attempt))
            except Exception as error:
                # The user's code may refuse made-up rows.
                found.error = found.error or error
            if found.is_clear:
                break
    return found


@contextlib.contextmanager
def nothing_kept(step: ReplicaStep, layer: keras.Layer) -> Iterator[None]:
    """Undoes all side effects of a layer that is called inside the context."""
    with (
        kept_attributes(layer),
        outside_replicas(),
        step.runner.probing(layer),
        kept_random_state(get_backend()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _compare(step: ReplicaStep, call: LayerCall, attempt: Attempt) -> Found:
    rows = FEW_ROWS
    whole, first, second = _on_parts(step, call, attempt, rows)
    again = _observed(step, call, attempt, rows, slice(None), ProbedDraws())
    is_noisy = _differ(whole, again)
    if is_noisy:
        rows = _MANY_ROWS
        whole, first, second = _on_parts(step, call, attempt, rows)
    tolerance = tolerance_of(call.layer)

    def kind(whole: Any, first: Any, second: Any) -> Kind:
        return kind_of(whole, first, second, is_noisy, tolerance)

    found = Found()
    if len(whole[0]) == len(first[0]) == len(second[0]):
        found.terms = list(map(kind, whole[0], first[0], second[0]))
    for key, (variable, change) in whole[1].items():
        if key in first[1] and key in second[1]:
            of_halves = first[1][key][1], second[1][key][1]
            found.variables[key] = variable, kind(change, *of_halves)
    return found


def tolerance_of(layer: keras.Layer) -> float:
    """Returns how much equal numbers may differ by rounding, relatively."""
    is_half = layer.compute_dtype in ("float16", "bfloat16")
    return 3e-2 if is_half else 2e-3


class ProbedDraws:
    """The draws of a call with all rows, of which others take their part."""

    def __init__(self) -> None:
        self._made: list[tuple[list[int], Any]] = []

    def of(self, part: slice, rows: int) -> Drawer:
        """Returns a function that makes the draws for some of the rows."""
        start, stop, _ = part.indices(rows)
        share = Share(stop - start, rows, start)
        if share.rows == rows:
            self._made.clear()
        left = iter([*self._made])

        def draw(made: Draw) -> Any:
            made.arguments["seed"] = 5  # the same for each part
            shape = made.shape
            if share.rows == rows:
                whole = made.for_all(None, {})
                self._made.append((shape, whole))
                return made.of(whole)
            of_all, whole = next(left, (shape, None))
            pairs = enumerate(zip(shape, of_all, strict=False))
            axis = next((i for i, (own, all_) in pairs if own != all_), None)
            if axis is None or made.shuffles(axis):
                return made.again()
            return made.of(rows_at(axis, shape, share).cut(whole))

        return draw


# A layer's losses, and the change of each variable that it assigned.
_Observed = tuple[list[Any], dict[int, tuple[Any, Any]]]


def _on_parts(
    step: ReplicaStep, call: LayerCall, attempt: Attempt, rows: int
) -> list[_Observed]:
    half = rows // 2
    parts = slice(None), slice(None, half), slice(half, None)
    draws = ProbedDraws()
    return [_observed(step, call, attempt, rows, part, draws) for part in parts]


def _observed(
    step: ReplicaStep,
    call: LayerCall,
    attempt: Attempt,
    rows: int,
    part: slice,
    draws: ProbedDraws,
) -> _Observed:
    args, kwargs = made_up(step, call, attempt, rows, part)
    scope = ProbeScope(step, call, attempt.shift)
    with drawn_by(draws.of(part, rows)), opened(scope):
        call.again(args, kwargs)
    terms = [
        _to_numpy(ops.sum(ops.cast(term, "float32"))) for term in scope.terms
    ]
    changes = {
        key: (variable, _to_numpy(scope.state_mapping[key]) - _to_numpy(before))
        for key, (variable, before) in scope.assigned.items()
        if not keras_random.is_seed(variable) and key not in scope.alike
    }
    return terms, changes


def _to_numpy(value: Any) -> Any:
    return np.asarray(ops.convert_to_numpy(value)).astype("float64")


def _differ(one: _Observed, other: _Observed) -> bool:
    values = [*one[0], *(change for _, change in one[1].values())]
    others = [*other[0], *(change for _, change in other[1].values())]
    return len(values) != len(others) or not all(
        np.allclose(a, b, rtol=1e-4, atol=1e-7, equal_nan=True)
        for a, b in zip(values, others, strict=True)
    )


def made_up(
    step: ReplicaStep,
    call: LayerCall,
    attempt: Attempt,
    rows: int,
    part: slice,
    alone: int | None = None,
) -> tuple[Any, Any]:
    """Returns arguments like those of a call, with `part` of other `rows`; with
    `alone`, only the leaf at that position is sliced."""
    arguments = (call.args, dict(call.kwargs))
    leaves = tree.flatten(arguments)
    factors = _rows_of(leaves, step.share.rows)
    rng = np.random.default_rng(3)
    made = []
    for place, (leaf, factor) in enumerate(zip(leaves, factors, strict=True)):
        if not ops.is_tensor(leaf):
            made.append(leaf)
            continue
        if attempt.own:
            values = _repeated(leaf, factor, rows)
        else:
            shape = [attempt.size if n is None else n for n in leaf.shape]
            if factor:
                shape[0] = factor * rows
            values = _values(rng, shape, leaf.dtype, attempt)
        if factor and alone in (None, place):
            own = slice(
                *(
                    None if end is None else factor * end
                    for end in (part.start, part.stop)
                )
            )
            values = values[own]
        made.append(ops.convert_to_tensor(values, dtype=leaf.dtype))
    args, kwargs = tree.pack_sequence_as(arguments, made)
    return args, kwargs


def _repeated(leaf: Any, factor: int, rows: int) -> Any:
    """Repeats a tensor's rows until there are `rows` of them."""
    values = np.asarray(ops.convert_to_numpy(ops.stop_gradient(leaf)))
    count = factor * rows
    if not factor or not len(values):
        return values
    return values[np.arange(count) % len(values)]


def _rows_of(leaves: Sequence[Any], rows: Any) -> list[int]:
    """Returns each tensor's values per row along axis 0, or 0 without rows."""
    sizes = [
        leaf.shape[0] if ops.is_tensor(leaf) and len(leaf.shape) else 0
        for leaf in leaves
    ]
    if not isinstance(rows, int):
        return [int(size is None) for size in sizes]
    rows = max(rows, 1)
    if any(size is None or size == rows for size in sizes):
        return [int(size is None or size == rows) for size in sizes]
    return [0 if size % rows else size // rows for size in sizes]


def _values(
    rng: np.random.Generator, shape: list[int], dtype: Any, attempt: Attempt
) -> Any:
    name = keras.backend.standardize_dtype(dtype)
    if name == "bool":
        values = rng.random(shape) < 0.7
        # A mask keeps at least one element of each row.
        return values | (np.arange(shape[-1]) == 0) if shape else values
    if keras.backend.is_float_dtype(name):
        if attempt.positive:
            return rng.uniform(0.1, 0.9, shape)
        return rng.normal(size=shape)
    return rng.integers(0, 2, shape)
