"""The executor for sharded optimizer state: variables whole, slots in parts.

An update reads each variable as a `DTensor`, too, whose part on this worker is
a view of the whole value. So gradients are sent to the workers of their parts,
Keras' own `apply` updates these, and updated parts are sent to all workers.
"""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_dist.errors import ClusterError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugins import WITH_APPLY
from keras_dist.plugins import Hook
from keras_dist.plugins import Hooks
from keras_dist.plugins import Replica
from keras_dist.plugins import as_hook
from keras_dist.plugins import current_replica
from keras_dist.plugins import inner_of
from keras_dist.plugins import is_of_keras
from keras_dist.plugins import packs
from keras_dist.plugins import trainable_variables
from keras_dist_torch.chunks import is_elementwise
from keras_dist_torch.flat import Division
from keras_dist_torch.flat import numbers_on
from keras_dist_torch.flat import scalars_on
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.keras_internals import ParallelOptimizer
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.sharded import ShardedExecutor
from keras_dist_torch.shards import as_shards
from keras_dist_torch.shards import division_of
from keras_dist_torch.shards import shards_scope
from keras_dist_torch.shards_hooks import table_of_updates


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
    if current_replica() is not None or shards_scope() is not None:
        return None
    for variable in variables or trainable_variables(optimizer):
        strategy = vars(variable).get("distribute_strategy")
        executor = None if strategy is None else strategy.executor
        return executor if isinstance(executor, SlotsExecutor) else None
    return None


def _table() -> Iterator[Hook]:
    yield from table_of_updates()
    why = "an update outside of steps takes parts of whole gradients"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", _hook_apply, why)


class SlotsExecutor(ShardedExecutor):
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
        local_sums = weighted_sum(here, weights, self._primary)
        return self._scattered(local_sums, variables, numbers)

    @contextlib.contextmanager
    def updating(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        trained = trainable_variables(optimizer)
        if not self.workers.may_share_tensors(self._primary.type):
            _check_sends_nothing(optimizer, trained)
        pairs = zip(trained, self._divisions(trained), strict=True)
        cut = [(v, division) for v, division in pairs if division.is_cut]
        try:
            views = [(v, self._view(v, division)) for v, division in cut]
            with self._updating_shards(optimizer, views):
                yield
        finally:
            # After an error, too: each worker may have changed its parts.
            with torch.no_grad():
                self._give_back(cut)

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
        pairs = [*zip(gradients, trained, strict=False)]
        for pair in pairs:
            _check_gradient(optimizer, *pair)
        self._check_alike(optimizer, [g for g, _ in pairs if g is not None])
        local_gradients = [
            as_shards(division.part(g), division, self._mesh)
            if g is not None and division.is_cut
            else g
            for g, division in zip(
                gradients, self._divisions(trained), strict=False
            )
        ]
        with self.updating(optimizer):
            original(
                optimizer,
                local_gradients + gradients[len(local_gradients) :],
                variables,
            )

    def _check_alike(
        self, optimizer: keras.Optimizer, gradients: Sequence[torch.Tensor]
    ) -> None:
        """Refuses gradients that differ between workers, of which each would
        use its own part."""
        sums = [gradient.detach().double().sum() for gradient in gradients]
        if not sums:
            return
        what = f"gradients for optimizer '{optimizer.name}'"
        everyone = self.workers.gather([torch.stack(sums)], what=what)
        gathered = [total.numpy(force=True) for (total,) in everyone]
        if all(
            np.array_equal(gathered[0], x, equal_nan=True) for x in gathered
        ):
            return
        raise ReplicaDivergenceError(
            f"Workers gave optimizer '{optimizer.name}' different gradients, "
            "outside of `fit` and `strategy.run`, which would sum them. "
            "Received: gradients with the sums "
            f"{[x.tolist() for x in gathered]}. Expected: the same gradients "
            "on each worker, or an update in a function that `strategy.run` "
            "calls."
        )

    def _divisions(self, variables: Sequence[keras.Variable]) -> list[Any]:
        """Returns the `Division` of each variable, or `Whole`."""
        return [
            TorchRecord.of(variable).division
            or division_of(variable, self.workers)
            for variable in variables
        ]

    def _view(self, variable: keras.Variable, division: Division) -> DTensor:
        """Returns a `DTensor` that shares a variable's memory."""
        record, whole = TorchRecord.of(variable), tensor_of(variable)
        if record.parts is None or record.address != whole.data_ptr():
            part = division.part(whole)
            record.parts = as_shards(part, division, self._mesh)
            record.address = whole.data_ptr()
        return record.parts

    def _scattered(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any],
    ) -> list[Any]:
        """Sums gradients over workers: of each, this worker's part, or all of a
        small one; `None` where no worker has one. Then numbers."""
        parts: list[Any] = [None] * len(variables)
        totals: list[torch.Tensor] = []
        divisions = self._divisions(variables)
        for indices in packs([variable.dtype for variable in variables]):
            like = tensor_of(variables[indices[0]])
            sent = [(gradients[i], divisions[i]) for i in indices]
            # Numbers travel with the first, which are float32.
            row = self.workers.scatter_sum(self._rows(like, sent, numbers))
            sizes = [division.size for _, division in sent]
            flags, number_totals, sums = row.split(
                [len(sent), len(numbers), sum(sizes)]
            )
            totals, numbers = totals + [*number_totals.unbind()], ()
            for i, is_there, piece in zip(
                indices, flags.tolist(), sums.split(sizes), strict=True
            ):
                if is_there:
                    parts[i] = divisions[i].from_row(piece)
                if is_there and divisions[i].is_cut:
                    parts[i] = as_shards(parts[i], divisions[i], self._mesh)
        return parts + totals

    def _rows(
        self,
        like: torch.Tensor,
        sent: Sequence[tuple[torch.Tensor | None, Any]],
        numbers: Sequence[Any],
    ) -> torch.Tensor:
        """Returns a row for each worker: which gradients there are, numbers,
        and its parts of the gradients."""
        count = self._mesh.size()
        flags = numbers_on(like.device, [float(g is not None) for g, _ in sent])
        shared = [flags.to(like.dtype), *scalars_on(like.device, numbers)]
        columns = [tensor.expand(count, -1) for tensor in shared]
        for gradient, division in sent:
            columns.append(
                like.new_zeros(1).expand(count, division.size)
                if gradient is None
                else division.rows(gradient.detach().to(like.dtype), count)
            )
        return torch.cat(columns, dim=1)

    def _give_back(
        self, cut: Sequence[tuple[keras.Variable, Division]]
    ) -> None:
        """Sets variables to the parts that all workers have updated."""
        for indices in packs([variable.dtype for variable, _ in cut]):
            chosen = [(tensor_of(cut[i][0]), cut[i][1]) for i in indices]
            local_rows = [
                division.rows(division.part(whole), 1)[0]
                for whole, division in chosen
            ]
            rows = self.workers.gather_flat(torch.cat(local_rows))
            parts = rows.view(self._mesh.size(), -1).split(
                [division.size for _, division in chosen], dim=1
            )
            for (whole, division), part in zip(chosen, parts, strict=True):
                whole.copy_(division.whole(part))


def _check_gradient(
    optimizer: keras.Optimizer, gradient: torch.Tensor, variable: keras.Variable
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
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable]
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
        "implementation=RING compute with elements of variables alone.\n"
        f"Received: {received}. Expected: no constraints, and one of Keras' "
        "Adam, AdamW, SGD, RMSprop, Adagrad, Adadelta, Adamax, Nadam and "
        "Lion. Or a GPU for each worker, or optimizer_state='mirrored'."
    )
