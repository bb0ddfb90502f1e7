"""A worker's only replica, which runs Keras' own step on the variables.

A loss counts by the worker's share of the rows when it is differentiated, so
that FSDP's sums are the gradients of the global batch.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial

from keras_dist.core.rows import Share
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.replica.state import outside_replicas
from keras_dist_torch.gradients import WeighsLosses
from keras_dist_torch.gradients import check_hooks
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.parts import GathersVariables
from keras_dist_torch.parts import stored
from keras_dist_torch.parts import tensor_in_use
from keras_dist_torch.workers import TorchWorkers

T = TypeVar("T")


class DirectReplica(Replica, GathersVariables, WeighsLosses):
    """A worker's only replica, which computes with the variables themselves."""

    has_copies = False

    def __init__(self, share: Share, group: ReplicaGroup) -> None:
        super().__init__(0, share, group)
        # By id: variables in parts that the step read, and what autograd
        # knows in their place.
        self._leaves: dict[int, tuple[keras.Variable, DTensor]] = {}
        # Whether losses have been differentiated, with the share's weight.
        self.has_gradients = False
        self._trained: Sequence[keras.Variable] = ()

    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        with outside_replicas(), torch.no_grad():
            return fn([value])

    def all_sum(
        self,
        what: str,
        value: torch.Tensor,
        total: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result: torch.Tensor = _Sum.apply(value, self.group.workers, total)
        return result

    def read(self, variable: keras.Variable) -> torch.Tensor | None:
        value = parameter_of(variable)
        if value is not None and stored(variable) is None:
            check_hooks(variable, value)
        return value

    def hold(self, variable: keras.Variable, value: Any) -> torch.Tensor:
        held = value.detach()
        return held.clone().requires_grad_() if variable.trainable else held

    def whole(self, variable: keras.Variable, kept: DTensor) -> torch.Tensor:
        if kept.grad is not None and self.has_gradients:
            return kept  # because the gradient is read
        if not (torch.is_grad_enabled() and variable.trainable):
            return kept.detach().full_tensor()
        known = self._leaves.get(id(variable))
        if known is None:
            known = variable, kept.detach().requires_grad_()
            self._leaves[id(variable)] = known
        # Each worker has the gradient of its own rows.
        whole = known[1].full_tensor(grad_placements=[Partial()])
        if self.has_gradients:
            whole.retain_grad()  # or PyTorch warns where it is read
        return whole

    def backward(self, original: Callable[[Any], None], tensors: Any) -> None:
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        original([each * self.share.weight for each in given])
        self._add_gradients()
        self.has_gradients = True

    def _add_gradients(self) -> None:
        """Adds gradients of variables that were gathered where they are read.

        Only now, because FSDP adds its own in another stream.
        """
        for variable, leaf in self._leaves.values():
            kept, own = tensor_in_use(variable), leaf.grad
            leaf.grad = None
            if own is not None:
                kept.grad = own if kept.grad is None else kept.grad + own

    def zero_grad(self, variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            tensor_in_use(variable).grad = None

    def trains(self, variables: Sequence[keras.Variable]) -> None:
        """Notes variables whose gradients an optimizer uses."""
        self._trained = variables

    def committed(self) -> None:
        # Gradients that were used are not kept until the next step.
        self.zero_grad(self._trained)
        self._trained = ()

    def close(self) -> None:
        """Forgets what the step has read."""
        self._leaves.clear()


class _Sum(torch.autograd.Function):
    """All-reduce over workers, in the backward pass as well."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        workers: TorchWorkers,
        total: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.workers = workers
        return workers.sum([value])[0] if total is None else total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None, None]:
        # Each worker's loss has its weight already.
        return ctx.workers.sum([gradient])[0], None, None
