"""A worker's only replica, which runs Keras' own step on the variables.

A loss counts by the worker's share of the rows when it is differentiated, so
that FSDP's sums are the gradients of the global batch.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NoReturn
from typing import TypeVar

import keras
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import Differentiated
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import RowShard
from keras_dist.plugins import current_replica
from keras_dist.plugins import current_step
from keras_dist.plugins import outside_replicas
from keras_dist_torch.exact import Exactly
from keras_dist_torch.gradients import detached
from keras_dist_torch.gradients import plain_backward
from keras_dist_torch.gradients import refuse_hooks
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.loss_weighting import WeighsLosses
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.replica import BaseReplica
from keras_dist_torch.shards import tensor_in_use

T = TypeVar("T")


class FSDPReplica(BaseReplica, WeighsLosses):
    """A worker's only replica, which computes with the variables themselves."""

    has_copies = False
    is_only = True

    def __init__(self, share: RowShard, group: ReplicaGroup) -> None:
        super().__init__(0, share, group)
        # By id: sharded variables that the step read, and what autograd
        # knows in their place.
        self._leaves: dict[int, tuple[keras.Variable, DTensor]] = {}
        # Whether losses have been differentiated by `backward`, so that all
        # gradients have the share's weight, or by `differentiate`.
        self.has_gradients = self._has_derived = False
        self._trained: Sequence[keras.Variable] = ()
        self._modes = contextlib.ExitStack()
        # By id: variables that were read.
        self._seen: dict[int, keras.Variable] = {}

    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: object
    ) -> T:
        with outside_replicas(), torch.no_grad():
            self.draws.of_round.compare(self.group.workers)
            return fn([value])

    def read(self, variable: keras.Variable) -> torch.Tensor | None:
        self._seen[id(variable)] = variable
        value = parameter_of(variable)
        if value is None or TorchRecord.of(variable).tensor is not None:
            return value
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            refuse_hooks(variable, value)
        return value

    def hold(self, variable: keras.Variable, value: Any) -> torch.Tensor:
        tensor = value.detach()
        return tensor.clone().requires_grad_() if variable.trainable else tensor

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
        if self._has_derived:
            _refuse_both()
        self._end_forward()
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        original([tensor * self.share.weight for tensor in given])
        self._add_gradients()
        self.has_gradients = True
        step = current_step()
        if step is not None and not step.ends_with_metrics:
            # Code of a user's own may look at them.
            self._modes.enter_context(Exactly())

    def _end_forward(self) -> None:
        """Compares draws for the last time before gradients are sent."""
        self.draws.of_round.compare(self.group.workers)
        self.draws.of_round.may_repeat = False

    def differentiate(
        self,
        fn: Callable[..., tuple[Any, Any]],
        variables: Sequence[keras.Variable],
        tensors: Sequence[torch.Tensor],
        is_nested: bool,
    ) -> Differentiated:
        _check_can_differentiate(variables, is_nested)
        if self.has_gradients:
            _refuse_both()
        self._has_derived = True
        is_step = current_step() is not None
        if not is_step:
            self._end_forward()
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            value, aux = fn(*leaves)
            if is_step:
                self._end_forward()
            if value.requires_grad:
                # In a step, losses have no weight yet, and FSDP sums gradients.
                weight = self.share.weight if is_step else 1.0
                plain_backward(value * weight)
        self._add_gradients()
        local_gradients = [*map(self._gradient_of, variables)]
        local_gradients += [tensor.grad for tensor in leaves]
        gradients = [
            self._as_given(gradient, is_step) for gradient in local_gradients
        ]
        self.zero_grad([*self._seen.values()])
        value, aux = keras.tree.map_structure(detached, (value, aux))
        return value, aux, gradients

    def _gradient_of(self, variable: keras.Variable) -> torch.Tensor | None:
        state = current_replica()
        assert state is not None
        leaf = state.scope.state_mapping.get(id(variable))
        return (tensor_in_use(variable) if leaf is None else leaf).grad

    def _as_given(self, gradient: torch.Tensor, is_step: bool) -> Any:
        """Returns a gradient as code gets it: its own replica's, or sealed."""
        if isinstance(gradient, DTensor):
            return SummedGradient.of(gradient)
        if gradient is None or not is_step:
            return gradient
        return gradient * self.share.inverse

    def _add_gradients(self) -> None:
        """Adds gradients of variables that were gathered where they are read.

        Only now, because FSDP adds its own in another stream.
        """
        for variable, leaf in self._leaves.values():
            kept, gradient = tensor_in_use(variable), leaf.grad
            leaf.grad = None
            if gradient is not None:
                kept.grad = (
                    gradient if kept.grad is None else kept.grad + gradient
                )

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
        self._modes.close()
        self._leaves.clear()
        self._seen.clear()


def _refuse_both() -> NoReturn:
    raise UnsupportedModelError(
        "A step on variables in parts computed gradients in two ways, which "
        "count differently.\nReceived: `backward` and "
        "`keras_dist.value_and_grad` or `gradient`. Expected: one of them for "
        "all gradients of a step. Or use variables='mirrored'."
    )


def _check_can_differentiate(
    variables: Sequence[keras.Variable], is_nested: bool
) -> None:
    received = "a gradient of a gradient" if is_nested else ""
    for variable in variables:
        if not variable.trainable:
            received = (
                f"the gradient of {variable.path}, which is not trainable"
            )
    if not received:
        return
    raise UnsupportedModelError(
        "With variables='sharded' on PyTorch, a step computes gradients of "
        "trainable variables and of tensors, once.\nReceived: "
        f"{received}. Expected: `value_and_grad` of a loss without gradients "
        "in it, for trainable variables. Or use variables='mirrored'."
    )


class SummedGradient(torch.Tensor):
    """A gradient in parts that is a sum over workers, for optimizers only.

    Code in a step would take it for the replica's own.
    """

    parts: DTensor

    @classmethod
    def of(cls, gradient: DTensor) -> torch.Tensor:
        """Keeps code from a gradient in parts."""
        empty = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta")
        made: SummedGradient = empty.as_subclass(cls)
        made.parts = gradient
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: object,
        args: object = (),
        kwargs: object = None,
    ) -> Any:
        if func in _DESCRIBING:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise UnsupportedModelError(
            "A gradient of a variable in parts was used in a step.\n"
            "It is a sum over workers, and not this replica's own. Expected: "
            "gradients of `value_and_grad` that are given to "
            "`optimizer.apply` as they are. To clip them, use the optimizer's "
            "`clipnorm`, `global_clipnorm` or `clipvalue`. Or use "
            "variables='mirrored'."
        )

    def __repr__(self, **options: Any) -> str:
        return f"<{type(self).__name__} shape={tuple(self.shape)}>"


# What may be asked of such a gradient.
_DESCRIBING = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
}


def sharded(gradient: torch.Tensor) -> Any:
    """Returns the `DTensor` of a sealed gradient, and others as they are."""
    return getattr(gradient, "parts", gradient)
