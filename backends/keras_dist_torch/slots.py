"""The executor for sharded optimizer state: variables whole, slots in parts.

An update reads each variable as a `DTensor`, too, whose part on this worker is
a view of the whole value. So gradients are sent to the workers of their parts,
Keras' own `apply` updates these, and updated parts are sent to all workers.
"""

import contextlib
import math
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_dist.core.packing import packs
from keras_dist.errors import ClusterError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_internals import is_of_keras
from keras_dist.internals.keras_optimizers import WITH_APPLY
from keras_dist.internals.keras_optimizers import inner_of
from keras_dist.internals.keras_optimizers import trainable_variables
from keras_dist.plugin.replica import Replica
from keras_dist.replica.state import current_replica
from keras_dist_torch.chunks import is_elementwise
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.in_parts import PartsExecutor
from keras_dist_torch.keras_internals import ParallelOptimizer
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.parts import Division
from keras_dist_torch.parts import is_large
from keras_dist_torch.parts import parts_scope
from keras_dist_torch.parts_hooks import table_of_updates
from keras_dist_torch.transfers import numbers_on
from keras_dist_torch.transfers import scalars_on

# Attribute of a whole variable: its `_Shard`.
_SHARD = "_keras_dist_shard"


@as_hook
def _hook_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Takes parts of gradients that are the same on all workers, in an update
    outside of steps."""
    variables = trainable_variables and list(trainable_variables)
    executor = _executor_of(self, variables)
    if executor is None:
        original(self, grads, variables)
    else:
        executor.apply(original, self, [*grads], variables)


def _executor_of(optimizer: Any, variables: Any) -> "SlotsExecutor | None":
    if current_replica() is not None or parts_scope() is not None:
        return None
    for variable in variables or trainable_variables(optimizer):
        strategy = vars(variable).get("distribute_strategy")
        found = None if strategy is None else strategy.executor
        return found if isinstance(found, SlotsExecutor) else None
    return None


def _table() -> Iterator[Hook]:
    yield from table_of_updates()
    why = "an update outside of steps takes parts of whole gradients"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", _hook_apply, why)


class SlotsExecutor(PartsExecutor):
    """Workers that each update a part of each variable, and keep its slots."""

    hooks = Hooks(_table)

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        here = self.arrived(replica, gradients)
        own = weighted_sum(here, weights, self._home)
        return self._scattered(own, self._shards(variables), numbers)

    @contextlib.contextmanager
    def updating(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        trained = trainable_variables(optimizer)
        if not self.workers.may_share_tensors(self._home.type):
            _check_sends_nothing(optimizer, trained)
        shards = self._shards(trained)
        views = [(s.variable, s.view()) for s in shards if s.is_cut]
        try:
            with self._updating_parts(optimizer, views):
                yield
        finally:
            # After an error, too: each worker may have changed its parts.
            with torch.no_grad():
                self._give_back([shard for shard in shards if shard.is_cut])

    def apply(
        self,
        original: Any,
        optimizer: Any,
        gradients: list[Any],
        variables: Any,
    ) -> None:
        """Applies gradients that are whole, and the same on all workers."""
        if variables and not optimizer.built:
            optimizer.build(variables)
        trained = variables or trainable_variables(optimizer)
        # Keras refuses other numbers of gradients.
        pairs = [*zip(gradients, self._shards(trained), strict=False)]
        for gradient, shard in pairs:
            _check_gradient(optimizer, gradient, shard.variable)
        self._check_alike(optimizer, [g for g, _ in pairs if g is not None])
        own = [g if g is None else shard.cut(g) for g, shard in pairs]
        with self.updating(optimizer):
            original(optimizer, own + gradients[len(own) :], variables)

    def _check_alike(
        self, optimizer: Any, gradients: Sequence[torch.Tensor]
    ) -> None:
        """Refuses gradients that differ between workers, of which each would
        use its own part."""
        sums = [gradient.detach().double().sum() for gradient in gradients]
        if not sums:
            return
        what = f"gradients for optimizer '{optimizer.name}'"
        everyone = self.workers.gather([torch.stack(sums)], what=what)
        found = [own.numpy(force=True) for (own,) in everyone]
        if all(np.array_equal(found[0], x, equal_nan=True) for x in found):
            return
        raise ReplicaDivergenceError(
            f"Workers gave optimizer '{optimizer.name}' different gradients, "
            "outside of `fit` and `strategy.run`, which would sum them. "
            f"Received: gradients with the sums {[x.tolist() for x in found]}. "
            "Expected: the same gradients on each worker, or an update in a "
            "function that `strategy.run` calls."
        )

    def _shards(self, variables: Sequence[keras.Variable]) -> list["_Shard"]:
        found = []
        for variable in variables:
            known = vars(variable).get(_SHARD)
            if known is None:
                known = _Shard(variable, self._mesh)
                vars(variable)[_SHARD] = known
            found.append(known)
        return found

    def _scattered(
        self,
        gradients: Sequence[torch.Tensor | None],
        shards: list["_Shard"],
        numbers: Sequence[Any],
    ) -> list[Any]:
        """Sums gradients over workers: of each, this worker's part, or all of a
        small one; `None` where no worker has one. Then numbers."""
        found: list[Any] = [None] * len(shards)
        totals: list[torch.Tensor] = []
        for indices in packs([shard.variable.dtype for shard in shards]):
            sent = [(gradients[i], shards[i]) for i in indices]
            sizes = [shard.size for _, shard in sent]
            # Numbers travel with the first, which are float32.
            rows, count = self._rows(sent, numbers), len(numbers)
            row = self.workers.scatter_sum(rows)
            flags, told, sums = row.split([len(sent), count, sum(sizes)])
            totals, numbers = totals + [*told.unbind()], ()
            for i, is_there, own in zip(
                indices, flags.tolist(), sums.split(sizes), strict=True
            ):
                found[i] = shards[i].from_row(own) if is_there else None
        return found + totals

    def _rows(
        self,
        sent: Sequence[tuple[Any, "_Shard"]],
        numbers: Sequence[Any],
    ) -> torch.Tensor:
        """Returns a row for each worker: which gradients there are, numbers,
        and its parts of the gradients."""
        count, first = self._mesh.size(), tensor_of(sent[0][1].variable)
        flags = numbers_on(
            first.device, [float(g is not None) for g, _ in sent]
        )
        columns = [flags.to(first.dtype).expand(count, -1)]
        for told in scalars_on(first.device, numbers):
            columns.append(told.expand(count, -1))
        for gradient, shard in sent:
            if gradient is None:
                own = first.new_zeros(1).expand(count, shard.size)
            else:
                own = shard.rows(gradient.detach().to(first.dtype), count)
            columns.append(own)
        return torch.cat(columns, dim=1)

    def _give_back(self, shards: list["_Shard"]) -> None:
        """Sets variables to the parts that all workers have updated."""
        for indices in packs([shard.variable.dtype for shard in shards]):
            chosen = [shards[i] for i in indices]
            own = torch.cat([shard.own_row() for shard in chosen])
            rows = self.workers.gather_flat(own).view(self._mesh.size(), -1)
            parts = rows.split([shard.size for shard in chosen], dim=1)
            for shard, each in zip(chosen, parts, strict=True):
                shard.write(each)


def _check_gradient(
    optimizer: Any, gradient: Any, variable: keras.Variable
) -> None:
    shape = tuple(variable.shape)
    is_tensor = isinstance(gradient, torch.Tensor)
    if gradient is None or (is_tensor and gradient.shape == shape):
        return
    received = f"shape {tuple(gradient.shape)}" if is_tensor else repr(gradient)
    raise ValueError(
        f"Optimizer '{optimizer.name}' was given something else than a "
        f"gradient of variable '{variable.path}'. Received: {received}. "
        f"Expected: a tensor of shape {shape}."
    )


def _check_sends_nothing(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> None:
    """Refuses an update for which PyTorch would send tensors itself."""
    inner = inner_of(optimizer)
    is_local = (
        isinstance(inner, ParallelOptimizer)
        and is_elementwise(inner)
        and is_of_keras(type(inner))
    )
    wrong = [v.path for v in variables if v.constraint is not None]
    if is_local and not wrong:
        return
    received = f"a constraint of {wrong[0]}" if wrong else type(inner).__name__
    raise ClusterError(
        "With optimizer_state='sharded', workers that share a GPU or use "
        "implementation=RING compute with elements of variables alone. "
        f"Received: {received}. Expected: no constraints, and one of Keras' "
        "Adam, AdamW, SGD, RMSprop, Adagrad, Adadelta, Adamax, Nadam and "
        "Lion. Or a GPU for each worker, or optimizer_state='mirrored'."
    )


class _Shard:
    """The part of a whole variable that this worker updates, or all of it."""

    def __init__(self, variable: keras.Variable, mesh: DeviceMesh) -> None:
        self.variable = variable
        self.is_cut = is_large(variable)
        self.size = math.prod(variable.shape)
        if self.is_cut:
            self._division = Division(tuple(variable.shape), mesh)
            self.size = self._division.size
        self._view: DTensor | None = None
        self._memory = 0  # where the whole value was

    def view(self) -> DTensor:
        """Returns a `DTensor` that shares the variable's memory."""
        whole = tensor_of(self.variable)
        if self._view is None or self._memory != whole.data_ptr():
            self._view, self._memory = self.cut(whole), whole.data_ptr()
        return self._view

    def cut(self, whole: torch.Tensor) -> Any:
        """Returns this worker's part of a whole tensor, as a view."""
        if not self.is_cut:
            return whole
        return self._division.parts(self._division.part(whole))

    def rows(self, gradient: torch.Tensor, count: int) -> torch.Tensor:
        """Returns what each of that many workers gets of a gradient."""
        if self.is_cut:
            return self._division.rows(gradient, count)
        return gradient.reshape(1, -1).expand(count, -1)

    def from_row(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the gradient for the update from this worker's row."""
        if self.is_cut:
            return self._division.parts(self._division.from_row(row))
        return row.view(tuple(self.variable.shape))

    def own_row(self) -> torch.Tensor:
        """Returns this worker's part of the variable, flat and padded."""
        part = self._division.part(tensor_of(self.variable))
        return self._division.rows(part, 1)[0]

    def write(self, rows: torch.Tensor) -> None:
        """Sets the variable from the parts of all workers."""
        tensor_of(self.variable).copy_(self._division.whole(rows))
