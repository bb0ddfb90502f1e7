"""Exchange of parts: gradients to their replicas, updated variables back.

Between workers it uses tensors of shape (number of parts, S). Row `p` is the
concatenation of part `p` of every variable.
"""

from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from keras_dist.sharding.sharded_optimizer import ShardedOptimizer
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.pieces import CutVariable
from keras_dist_torch.pieces import piece

# For each local replica, its part of each variable, or `None`.
PartsOfAll = list[list[Any]]


class Exchange(ABC):
    """Sums of gradients in parts, and assignments of parts to variables."""

    def __init__(self, sharded: ShardedOptimizer, cut: CutVariable) -> None:
        self.sharded = sharded
        self.cut = cut
        self.sizes = [parts.size for parts in sharded.parts]

    @abstractmethod
    def sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> tuple[PartsOfAll, list[bool]]:
        """Sums gradients over replicas.

        Args:
            gradients: For each local replica that takes part, a gradient of
                each variable, or `None`.
            weights: For each local replica that takes part, its weight.

        Returns:
            For each local replica, its part of each sum, on its device; and,
            for each variable, whether any replica has a gradient.
        """

    @abstractmethod
    def parameters(self) -> PartsOfAll:
        """Returns each local replica's parts of the variables, to write to."""

    @abstractmethod
    def give_back(self, parameters: PartsOfAll) -> None:
        """Assigns the parts that all replicas have written to the variables."""

    def flat(self, index: int) -> torch.Tensor:
        """Returns a variable's tensor, flat, and as a view if it can be one."""
        parameter = parameter_of(self.sharded.trainable_variables[index])
        assert parameter is not None
        return parameter.detach().reshape(-1)

    def write(self, index: int, flat: torch.Tensor) -> None:
        """Copies elements to a variable, unless they are a view of it."""
        parameter = parameter_of(self.sharded.trainable_variables[index])
        assert parameter is not None
        if flat.data_ptr() != parameter.data_ptr():
            parameter.copy_(flat[: parameter.numel()].view(parameter.shape))


class LocalExchange(Exchange):
    """Exchange between the replicas of one process, by plain copies."""

    def sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> tuple[PartsOfAll, list[bool]]:
        present = [
            any(own[index] is not None for own in gradients)
            for index in range(len(self.sizes))
        ]
        is_one_device = len(set(self.cut.devices)) == 1
        if is_one_device:
            # Sums whole gradients at once, of which the parts are views.
            device = self.cut.devices[0]
            gradients = [weighted_sum(gradients, weights, device)]
            weights = []
        sums = []
        for part, device in enumerate(self.cut.devices):
            own = [
                [self._own(g, i, part) for i, g in enumerate(each)]
                for each in gradients
            ]
            total = own[0]
            if not is_one_device:
                total = weighted_sum(own, weights, device)
            sums.append(
                [
                    None if g is None else _filled(g, size)
                    for g, size in zip(total, self.sizes, strict=True)
                ]
            )
        return sums, present

    def _own(self, gradient: Any, index: int, part: int) -> Any:
        if gradient is None:
            return None
        return piece(gradient.detach().reshape(-1), part, self.sizes[index])

    def parameters(self) -> PartsOfAll:
        return [
            [
                _filled(piece(self.flat(i), part, size).to(device), size)
                for i, size in enumerate(self.sizes)
            ]
            for part, device in enumerate(self.cut.devices)
        ]

    def give_back(self, parameters: PartsOfAll) -> None:
        for index, size in enumerate(self.sizes):
            flat = self.flat(index)
            for part, own in enumerate(parameters):
                target, value = piece(flat, part, size), own[index]
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value[: target.numel()])
            self.write(index, flat)


class WorkerExchange(Exchange):
    """Exchange between workers: a reduce-scatter and an all-gather by dtype."""

    def __init__(self, sharded: ShardedOptimizer, cut: CutVariable) -> None:
        super().__init__(sharded, cut)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in range(len(self.sizes)):
            by_dtype.setdefault(self.flat(index).dtype, []).append(index)
        self._groups = by_dtype
        self._own: dict[torch.dtype, torch.Tensor] = {}

    def sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> tuple[PartsOfAll, list[bool]]:
        here = weighted_sum(gradients, weights, self.cut.primary)
        count = len(self.sizes)
        sums: PartsOfAll = [[None] * count for _ in self.cut.devices]
        present = [False] * count
        for dtype, indices in self._groups.items():
            rows = self._rows([here[i] for i in indices], indices, dtype)
            has = [float(here[i] is not None) for i in indices]
            total, counts = self._scatter(rows, has)
            for i, counted in zip(indices, counts, strict=True):
                present[i] = bool(counted)
            sizes = [self.sizes[i] for i in indices]
            for part, row in enumerate(total):
                device = self.cut.devices[part]
                for i, own in zip(indices, row.split(sizes), strict=True):
                    if present[i]:
                        sums[part][i] = own.to(device)
        return sums, present

    def _scatter(
        self, rows: torch.Tensor, has: list[float]
    ) -> tuple[torch.Tensor, list[float]]:
        """Sums rows over workers; returns this worker's, and sums of flags.

        A flag in `has` is 1 if this worker has that gradient.
        """
        workers, local = self.cut.workers, len(self.cut.devices)
        assert workers is not None
        count = workers.cluster.num_workers
        flags = rows.new_tensor(has).expand(count, len(has))
        sent = torch.cat([rows.reshape(count, -1), flags], dim=1)
        own = workers.scatter_sum(sent)
        numbers = own[own.numel() - len(has) :]
        total = own[: own.numel() - len(has)].reshape(local, -1)
        return total, numbers.tolist()

    def _rows(
        self,
        values: Sequence[torch.Tensor | None],
        indices: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Splits whole tensors into a row for each part of all workers."""
        num_parts = self.cut.num_parts
        columns = []
        for value, index in zip(values, indices, strict=True):
            size = self.sizes[index]
            if value is None:
                value = torch.zeros(0, dtype=dtype, device=self.cut.primary)
            flat = _filled(
                value.detach().reshape(-1).to(dtype), num_parts * size
            )
            columns.append(flat.reshape(num_parts, size))
        return torch.cat(columns, dim=1)

    def parameters(self) -> PartsOfAll:
        local = len(self.cut.devices)
        found: PartsOfAll = [[None] * len(self.sizes) for _ in range(local)]
        for indices in self._groups.values():
            for part in range(local):
                number = self.cut.first + part
                for i in indices:
                    size = self.sizes[i]
                    own = piece(self.flat(i), number, size)
                    own = own.to(self.cut.devices[part], copy=True)
                    found[part][i] = _filled(own, size)
        return found

    def give_back(self, parameters: PartsOfAll) -> None:
        workers, num_parts = self.cut.workers, self.cut.num_parts
        assert workers is not None
        for indices in self._groups.values():
            own = torch.cat(
                [
                    row[i].to(self.cut.primary)
                    for row in parameters
                    for i in indices
                ]
            )
            rows = workers.gather_flat(own).reshape(num_parts, -1)
            sizes = [self.sizes[i] for i in indices]
            for i, columns in zip(
                indices, rows.split(sizes, dim=1), strict=True
            ):
                self.write(i, columns.reshape(-1))


def _filled(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Pads a flat tensor with zeros to a size."""
    missing = size - flat.numel()
    if not missing:
        return flat
    return torch.nn.functional.pad(flat, (0, missing))
