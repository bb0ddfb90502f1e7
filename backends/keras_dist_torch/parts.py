"""Variables in parts: a `DTensor` each, of which a worker keeps its shard."""

import contextlib
import threading
from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence

import keras
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor

from keras_dist.core.context import replaced
from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.home import ShardedHome
from keras_dist.replica.state import current_replica
from keras_dist.replica.variables import ShardedVariable
from keras_dist_torch.keras_internals import device_scope
from keras_dist_torch.keras_internals import forget_parameter
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.workers import TorchWorkers

# Attributes of a variable: its `DTensor`, in whose place is a whole tensor
# while FSDP has its layer compute; the `DTensor` at any time; and a whole value
# that a worker holds.
_STORED = "_keras_dist_stored"
_PARTS = "_keras_dist_parts"
_HELD = "_keras_dist_held"
# Set on slots of variables in parts, and on weights that are not trained.
# Their whole values are the same on all workers.
_MARKED = "_keras_dist_goes_in_parts"
# With fewer elements, a variable is not worth a collective.
LEAST_ELEMENTS = 1024


class _PartsReading(threading.local):
    """Says if a thread reads variables as `DTensor`s."""

    def __init__(self) -> None:
        self.as_parts = False
        # Whether these are this worker's own tensors.
        self.as_local = False


_reading = _PartsReading()


def as_parts() -> contextlib.AbstractContextManager[None]:
    """Has variables read as `DTensor`s, and nothing gathered, inside."""
    return replaced(_reading, as_parts=True)


def as_local_parts() -> contextlib.AbstractContextManager[None]:
    """Has `DTensor`s read as this worker's parts, inside of `as_parts`."""
    return replaced(_reading, as_local=True)


def reads_parts() -> bool:
    """Returns whether this thread is inside of `as_parts`."""
    return _reading.as_parts


class GathersVariables(ABC):
    """A replica that reads variables in parts for a step with gradients."""

    @abstractmethod
    def whole(self, variable: keras.Variable, kept: DTensor) -> torch.Tensor:
        """Returns the value that the step computes with."""


def placement(shape: Sequence[int], count: int) -> Shard:
    """Returns the axis to shard: the largest that splits into equal parts.

    Without one it is the first, as FSDP divides no other unequally.
    """
    equal = [axis for axis, size in enumerate(shape) if size % count == 0]
    return Shard(max(equal, key=lambda axis: shape[axis], default=0))


def stored(variable: keras.Variable) -> torch.Tensor | None:
    """Returns a variable's `DTensor`, or its whole value in a layer's call;
    `None` if the variable is not in parts."""
    found: torch.Tensor | None = vars(variable).get(_STORED)
    return found


def tensor_in_use(variable: keras.Variable) -> torch.Tensor:
    """Returns the tensor of a variable that has its gradient."""
    found = stored(variable)
    return tensor_of(variable) if found is None else found


def store(variable: keras.Variable, tensor: torch.Tensor) -> None:
    vars(variable)[_STORED] = tensor
    if isinstance(tensor, DTensor):
        vars(variable)[_PARTS] = tensor


def are_in_parts(variables: Sequence[keras.Variable]) -> bool:
    return any(_STORED in vars(variable) for variable in variables)


def is_to_split(variable: keras.Variable) -> bool:
    """Returns whether a variable without a home yet belongs in parts."""
    is_new = type(variable) is keras.Variable and variable.trainable
    return _MARKED in vars(variable) or (is_new and _is_large(variable))


def _is_large(variable: keras.Variable) -> bool:
    shape = variable.shape
    return (
        variable.synchronization != "on_read"
        and keras.backend.is_float_dtype(variable.dtype)
        and shape is not None
        and None not in shape
        and len(shape) > 0
        and int(np.prod(shape)) >= LEAST_ELEMENTS
    )


def mark_slot(variable: keras.Variable, reference: keras.Variable) -> None:
    """Notes a slot of a variable in parts, which is divided alike."""
    is_alike = tuple(variable.shape) == tuple(reference.shape)
    if isinstance(reference, ShardedVariable) and is_alike:
        vars(variable)[_MARKED] = True


def marked_weight(variable: keras.Variable) -> bool:
    """Marks a whole weight that is not trained, if it belongs in parts.

    Of numbers along one axis, such as moving averages, each worker has all.
    """
    if are_in_parts([variable]) or not _is_large(variable):
        return False
    if sum(size > 1 for size in variable.shape) < 2:
        return False
    vars(variable)[_MARKED] = True
    return True


class DTensorHome(ShardedHome):
    """The home of a variable that is a `DTensor` over the workers."""

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

    @property
    def is_split(self) -> bool:
        return _STORED in vars(self.variable)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._plan.devices

    def bytes_kept(self) -> dict[Device, int]:
        kept = stored(self.variable)
        if kept is None:
            return super().bytes_kept()
        if isinstance(kept, DTensor):
            kept = kept.to_local()
        return {self._plan.primary: kept.nbytes}

    def settle(self) -> None:
        variable = self.variable
        whole = None if self.is_split else vars(variable).get("_value")
        if whole is None:
            return
        whole = whole.detach().to(self._mesh.device_type)
        if _MARKED not in vars(variable):  # which is the same on all workers
            (whole,) = self._workers.broadcast([whole])
        forget_parameter(variable)
        store(variable, self.split(whole))

    def split(self, whole: torch.Tensor) -> torch.nn.Parameter:
        """Returns a `DTensor` with this worker's part of a whole value."""
        own = self._distributed(whole)
        # A copy, because a part that is a view would keep the whole alive.
        part = DTensor.from_local(
            own.to_local().clone(),
            self._mesh,
            own.placements,
            run_check=False,
            shape=own.shape,
            stride=own.stride(),
        )
        is_trainable = self.variable.trainable
        return torch.nn.Parameter(part, requires_grad=is_trainable)

    def _distributed(self, whole: torch.Tensor) -> DTensor:
        shard = placement(whole.shape, self._mesh.size())
        # Each worker has the whole value: nothing is sent.
        return distribute_tensor(
            whole.contiguous(), self._mesh, [shard], src_data_rank=None
        )

    def read(self, index: int) -> torch.Tensor:
        return self.whole()

    def whole(self) -> torch.Tensor:
        kept, held = stored(self.variable), vars(self.variable).get(_HELD)
        assert kept is not None
        # A symbolic call looks at the shape only.
        if device_scope() == "meta" or reads_parts():
            is_local = _reading.as_local and isinstance(kept, DTensor)
            return kept.to_local() if is_local else kept
        if held is not None:
            return held
        replica = getattr(current_replica(), "replica", None)
        if _is_in_another_dtype(self.variable, kept):
            kept = vars(self.variable)[_PARTS]
        if not isinstance(kept, DTensor):
            # FSDP frees it, which must be seen by no array of NumPy.
            is_probe = replica is None and not torch.is_grad_enabled()
            return kept.clone() if is_probe else kept
        if isinstance(replica, GathersVariables):
            return replica.whole(self.variable, kept)
        self._workers.meet(f"a read of {self.variable.path}")
        with self._workers.named():
            return kept.detach().full_tensor()

    def set_whole(self, value: torch.Tensor) -> None:
        kept, held = stored(self.variable), vars(self.variable).get(_HELD)
        assert kept is not None
        with torch.no_grad():
            if held is not None:
                held.copy_(value)
            elif not isinstance(kept, DTensor):
                raise _assigned_in_call(self.variable)
            elif isinstance(value, DTensor):
                kept.copy_(value.redistribute(placements=kept.placements))
            else:
                self._workers.meet(f"an assignment of {self.variable.path}")
                self._set_chiefs(value.to(kept.device))

    def take_chiefs(self, held: torch.Tensor | None) -> None:
        """Sets the value that the chief holds; all workers call it."""
        own = tensor_in_use(self.variable)
        if held is None:  # on another worker
            shape = tuple(self.variable.shape)
            held = torch.empty(shape, dtype=own.dtype, device=own.device)
        self._set_chiefs(held.to(own.device))

    def _set_chiefs(self, value: torch.Tensor) -> None:
        """Keeps this worker's part of the chief's value."""
        (sent,) = self._workers.broadcast([value])
        part = tensor_in_use(self.variable)
        assert isinstance(part, DTensor)
        with torch.no_grad():
            part.to_local().copy_(self._distributed(sent).to_local())

    def set_trainable(self, value: bool) -> None:
        kept = stored(self.variable)
        if kept is not None:
            kept.requires_grad_(value)


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


def hold(
    variable: keras.Variable, is_held: bool, device: torch.device | None
) -> None:
    """Gathers a variable on all workers; with `is_held`, this one holds it."""
    kept = stored(variable)
    assert isinstance(kept, DTensor)
    whole = kept.detach().full_tensor()
    if is_held:
        vars(variable)[_HELD] = whole.to(device or whole.device)


def release(variable: keras.Variable) -> torch.Tensor | None:
    """Drops the value that this worker holds, and returns it."""
    held: torch.Tensor | None = vars(variable).pop(_HELD, None)
    return held
