"""Sharded variables: a `DTensor` each, of which a worker keeps its shard."""

import math
from collections.abc import Iterable
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import Device
from keras_dist.plugins import Overlay
from keras_dist.plugins import Plan
from keras_dist.plugins import ShardedStorage
from keras_dist.plugins import current_replica
from keras_dist.plugins import stateless_scope
from keras_dist.plugins import value_of
from keras_dist_torch.flat import Division
from keras_dist_torch.flat import Whole
from keras_dist_torch.keras_internals import device_scope
from keras_dist_torch.keras_internals import forget_parameter
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.loss_weighting import differentiating
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.workers import TorchWorkers

# With fewer elements, a variable is not worth a collective.
LEAST_ELEMENTS = 1024


class ShardsScope(Overlay):
    """A scope in which variables are `DTensor`s, of which an assignment changes
    this worker's part, and nothing is gathered.

    Args:
        workers: `TorchWorkers`, or `None` if nothing is summed inside.
        views: Pairs of a whole variable and what stands for it.
    """

    is_base = True

    def __init__(
        self,
        workers: TorchWorkers | None = None,
        views: Iterable[tuple[keras.Variable, DTensor]] = (),
    ) -> None:
        super().__init__(views)
        self.workers = workers
        # Whether a `DTensor` is read as this worker's part of it.
        self.is_local = False

    def tensor(self, variable: keras.Variable) -> DTensor | None:
        """Returns what an update changes of a variable; `None`: all of it."""
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = TorchRecord.of(variable).tensor
        return value if isinstance(value, DTensor) else None

    def get_current_value(self, variable: keras.Variable) -> Any:
        # As in `tensor`, without its calls: an update reads often.
        value = self.state_mapping.get(id(variable))
        if value is None:
            record = vars(variable).get(TorchRecord.attribute)
            value = record and record.tensor
        if isinstance(value, DTensor):
            return value.to_local() if self.is_local else value
        if self.below is None:
            return value_of(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        tensor = self.tensor(variable)
        if tensor is None:
            if isinstance(value, DTensor):
                value = value.full_tensor()
            super().add_update((variable, value))
            return
        if isinstance(value, DTensor) and value.placements != tensor.placements:
            # By way of the whole value: PyTorch's own way from one axis to
            # another needs a default process group.
            whole = [Replicate() for _ in tensor.placements]
            value = value.redistribute(placements=whole)
            value = value.redistribute(placements=tensor.placements)
        with torch.no_grad():
            tensor.copy_(value)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's part of a `DTensor`, and others as they are."""
    is_sharded = isinstance(tensor, DTensor)
    local: torch.Tensor = tensor.to_local() if is_sharded else tensor
    return local


def shards_scope() -> ShardsScope | None:
    """Returns the scope in which this thread has sharded variables."""
    scope = stateless_scope()
    return scope if isinstance(scope, ShardsScope) else None


def as_shards(
    local: torch.Tensor, division: Division, mesh: DeviceMesh
) -> DTensor:
    """Returns the `DTensor` of which this worker has its own part."""
    shape = torch.Size(division.shape)
    return DTensor.from_local(
        local,
        mesh,
        [Shard(division.axis)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def tensor_in_use(variable: keras.Variable) -> torch.Tensor:
    """Returns the tensor of a variable that has its gradient."""
    tensor = TorchRecord.of(variable).tensor
    return tensor_of(variable) if tensor is None else tensor


def is_sharded(variable: keras.Variable) -> bool:
    return TorchRecord.of(variable).tensor is not None


def division_of(variable: keras.Variable, workers: TorchWorkers) -> Any:
    """Returns the `Division` of a variable's value; `Whole` for a small one."""
    record = TorchRecord.of(variable)
    if record.division is None:
        cluster, shape = workers.cluster, tuple(variable.shape)
        record.division = (
            Division(shape, cluster.num_workers, cluster.index)
            if is_large(variable)
            else Whole(shape)
        )
    return record.division


def is_large(variable: keras.Variable) -> bool:
    shape = variable.shape
    return (
        variable.synchronization != "on_read"
        and keras.backend.is_float_dtype(variable.dtype)
        and shape is not None
        and None not in shape
        and len(shape) > 0
        and math.prod(shape) >= LEAST_ELEMENTS
    )


class DTensorStorage(ShardedStorage):
    """The storage of a variable that is a `DTensor` over the workers."""

    def __init__(
        self,
        variable: keras.Variable,
        plan: Plan,
        mesh: DeviceMesh,
        workers: TorchWorkers,
    ) -> None:
        super().__init__(variable)
        self._plan = plan
        self._mesh = mesh
        self._workers = workers
        self._record = TorchRecord.of(variable)

    @property
    def is_split(self) -> bool:
        return self._record.tensor is not None

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._plan.devices

    def bytes_kept(self) -> dict[Device, int]:
        kept = self._record.tensor
        if kept is None:
            return super().bytes_kept()
        if isinstance(kept, DTensor):
            kept = kept.to_local()
        return {self._plan.primary: kept.nbytes}

    def place(self) -> None:
        variable = self.variable
        whole = None if self.is_split else vars(variable).get("_value")
        if whole is None:
            return
        whole = whole.detach().to(self._mesh.device_type)
        if not self._record.is_marked:
            (whole,) = self._workers.broadcast([whole])
        forget_parameter(variable)
        self._record.tensor = self._record.parts = self.split(whole)

    def split(self, whole: torch.Tensor) -> torch.nn.Parameter:
        """Returns a `DTensor` with this worker's part of a whole value."""
        division = division_of(self.variable, self._workers)
        # A copy, because a part that is a view would keep the whole alive.
        part = division.part(whole).clone(memory_format=torch.contiguous_format)
        is_trainable = self.variable.trainable
        parts = as_shards(part, division, self._mesh)
        return torch.nn.Parameter(parts, is_trainable)

    def _gathered(self, kept: DTensor) -> torch.Tensor:
        """Puts the whole value together; all workers call it."""
        division = division_of(self.variable, self._workers)
        (row,) = division.rows(kept.detach().to_local(), 1)
        rows = self._workers.gather_flat(row.contiguous())
        whole: torch.Tensor = division.whole(rows).contiguous()
        return whole

    def read(self, index: int) -> torch.Tensor:
        return self.whole()

    def whole(self) -> torch.Tensor:
        kept, host_copy = self._record.tensor, self._record.host_copy
        assert kept is not None
        # A symbolic call looks at the shape only.
        if device_scope() == "meta":
            return kept
        if host_copy is not None:
            return host_copy
        if _is_in_another_dtype(self.variable, kept):
            kept = self._record.parts
        if not isinstance(kept, DTensor):
            # FSDP frees it, which must be seen by no array of NumPy.
            is_step = current_replica() is not None or torch.is_grad_enabled()
            return kept if is_step else kept.clone()
        replica = differentiating()
        if replica is not None:
            whole: torch.Tensor = replica.whole(self.variable, kept)
            return whole
        self._workers.barrier(f"a read of {self.variable.path}")
        return self._gathered(kept)

    def set_whole(self, value: torch.Tensor) -> None:
        kept, host_copy = self._record.tensor, self._record.host_copy
        assert kept is not None
        with torch.no_grad():
            if host_copy is not None:
                host_copy.copy_(value)
            elif not isinstance(kept, DTensor):
                raise _assigned_in_call(self.variable)
            elif isinstance(value, DTensor):
                kept.copy_(value.redistribute(placements=kept.placements))
            else:
                self._workers.barrier(f"an assignment of {self.variable.path}")
                self._set_chiefs(value.to(kept.device))

    def take_chiefs(self) -> None:
        """Sets the value that the chief holds; all workers call it."""
        parts, whole = self._record.parts, self.release()
        if whole is None:  # on another worker
            shape = tuple(self.variable.shape)
            whole = torch.empty(shape, dtype=parts.dtype, device=parts.device)
        self._set_chiefs(whole.to(parts.device))

    def _set_chiefs(self, value: torch.Tensor) -> None:
        """Keeps this worker's part of the chief's value."""
        (sent,) = self._workers.broadcast([value])
        part = division_of(self.variable, self._workers).part(sent)
        with torch.no_grad():
            self._record.parts.to_local().copy_(part)

    def hold(self, is_held: bool) -> None:
        """Gathers the value on all workers; with `is_held`, this one holds it,
        in the memory of its host."""
        whole = self._gathered(self._record.parts)
        if is_held:
            self._record.host_copy = whole.cpu()

    def release(self) -> torch.Tensor | None:
        """Drops the value that this worker holds, and returns it."""
        host_copy, self._record.host_copy = self._record.host_copy, None
        return host_copy

    def set_trainable(self, value: bool) -> None:
        if self._record.tensor is not None:
            self._record.tensor.requires_grad_(value)


def _is_in_another_dtype(
    variable: keras.Variable, tensor: torch.Tensor
) -> bool:
    """Returns whether a tensor has lost what a reader of its variable needs."""
    is_gathered = not isinstance(tensor, DTensor)
    return is_gathered and tensor.dtype != getattr(torch, variable.dtype)


def _assigned_in_call(variable: keras.Variable) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Variable '{variable.path}' was assigned while its layer computes, "
        "outside of `fit` and its relatives. With variables='sharded', the "
        "layer has a copy then, which is dropped at its end. Assign the "
        "variable before or after the call, or use variables='mirrored'."
    )
