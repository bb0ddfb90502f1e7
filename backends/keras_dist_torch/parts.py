"""Variables in parts: a `DTensor` each, of which a worker keeps its shard."""

import math
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.plugin.home import ShardedHome
from keras_dist.replica.scopes import Overlay
from keras_dist.replica.state import current_replica
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


class InParts(Overlay):
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
        found = self.state_mapping.get(id(variable))
        if found is None:
            found = vars(variable).get(_STORED)
        return found if isinstance(found, DTensor) else None

    def get_current_value(self, variable: keras.Variable) -> Any:
        found = self.tensor(variable)
        if found is not None:
            return found.to_local() if self.is_local else found
        if self.below is None:
            return keras_internals.value_of(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        own = self.tensor(variable)
        if own is None:
            if isinstance(value, DTensor):
                value = value.full_tensor()
            super().add_update((variable, value))
            return
        if isinstance(value, DTensor) and value.placements != own.placements:
            # By way of the whole value: PyTorch's own way from one axis to
            # another needs a default process group.
            whole = [Replicate() for _ in own.placements]
            value = value.redistribute(placements=whole)
            value = value.redistribute(placements=own.placements)
        with torch.no_grad():
            own.copy_(value)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's part of a `DTensor`, and others as they are."""
    is_in_parts = isinstance(tensor, DTensor)
    own: torch.Tensor = tensor.to_local() if is_in_parts else tensor
    return own


def parts_scope() -> InParts | None:
    """Returns the scope in which this thread has variables in parts."""
    scope = keras_internals.stateless_scope()
    return scope if isinstance(scope, InParts) else None


class GathersVariables(ABC):
    """A replica that reads variables in parts for a step with gradients."""

    @abstractmethod
    def whole(self, variable: keras.Variable, kept: DTensor) -> torch.Tensor:
        """Returns the value that the step computes with."""


def placement(shape: Sequence[int], count: int) -> Shard:
    """Returns the axis to shard: the first that splits into equal parts, since
    parts along a later one are strided.

    Without one it is axis 0, as FSDP divides no other unequally.
    """
    equal = (axis for axis, size in enumerate(shape) if size % count == 0)
    return Shard(next(equal, 0))


class Division:
    """The parts of a whole value of some shape: as of `torch.chunk`, one for
    each worker, along one axis."""

    def __init__(self, shape: Sequence[int], mesh: DeviceMesh) -> None:
        self.place = placement(shape, mesh.size())
        self._mesh = mesh
        self._shape = torch.Size(shape)
        self._stride = torch.empty(self._shape, device="meta").stride()
        axis, count = self.place.dim, mesh.size()
        self._length = shape[axis]
        self._others = [*shape[:axis], *shape[axis + 1 :]]
        # Rows are indices along the axis; the last parts may have fewer.
        self._rows = -(-self._length // count)
        (index,) = mesh.get_coordinate() or (0,)
        self._start = min(self._rows * index, self._length)
        self._count = min(self._rows, self._length - self._start)
        # Elements of the largest part.
        self.size = self._rows * math.prod(self._others)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this worker's part of a whole tensor, which is a view."""
        return whole.detach().narrow(self.place.dim, self._start, self._count)

    def parts(self, own: torch.Tensor) -> DTensor:
        """Returns the `DTensor` of which this worker has its own part."""
        return DTensor.from_local(
            own,
            self._mesh,
            [self.place],
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )

    def rows(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """Returns a padded row for each part of a tensor, all or this one's."""
        first = tensor.movedim(self.place.dim, 0)
        missing = self._rows * count - first.shape[0]
        if missing:
            padding = first.new_zeros(missing, *self._others)
            first = torch.cat([first, padding])
        return first.reshape(count, -1)

    def from_row(self, row: torch.Tensor) -> torch.Tensor:
        """Returns this worker's part from its row."""
        first = row.view(self._rows, *self._others)[: self._count]
        return first.movedim(0, self.place.dim)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor from the rows of all parts."""
        first = rows.reshape(-1, *self._others)[: self._length]
        return first.movedim(0, self.place.dim)


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
    return _MARKED in vars(variable) or (is_new and is_large(variable))


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


def mark(variable: keras.Variable) -> None:
    """Notes a variable without a home that belongs in parts, and whose whole
    value is the same on all workers."""
    vars(variable)[_MARKED] = True


def is_marked(variable: keras.Variable) -> bool:
    return _MARKED in vars(variable)


def marked_weight(variable: keras.Variable) -> bool:
    """Marks a whole weight that is not trained, if it belongs in parts.

    Of numbers along one axis, such as moving averages, each worker has all.
    """
    if are_in_parts([variable]) or not is_large(variable):
        return False
    if sum(size > 1 for size in variable.shape) < 2:
        return False
    mark(variable)
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
        division = self._division
        # A copy, because a part that is a view would keep the whole alive.
        own = division.part(whole).clone(memory_format=torch.contiguous_format)
        is_trainable = self.variable.trainable
        return torch.nn.Parameter(division.parts(own), is_trainable)

    @property
    def _division(self) -> Division:
        return Division(tuple(self.variable.shape), self._mesh)

    def _gathered(self, kept: DTensor) -> torch.Tensor:
        """Puts the whole value together; all workers call it."""
        division = self._division
        (own,) = division.rows(kept.detach().to_local(), 1)
        rows = self._workers.gather_flat(own.contiguous())
        return division.whole(rows).contiguous()

    def read(self, index: int) -> torch.Tensor:
        return self.whole()

    def whole(self) -> torch.Tensor:
        kept, held = stored(self.variable), vars(self.variable).get(_HELD)
        assert kept is not None
        # A symbolic call looks at the shape only.
        if device_scope() == "meta":
            return kept
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
        self._workers.barrier(f"a read of {self.variable.path}")
        return self._gathered(kept)

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
                self._workers.barrier(f"an assignment of {self.variable.path}")
                self._set_chiefs(value.to(kept.device))

    def take_chiefs(self) -> None:
        """Sets the value that the chief holds; all workers call it."""
        own, held = tensor_in_use(self.variable), self.release()
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
            part.to_local().copy_(self._division.part(sent))

    def hold(self, is_held: bool) -> None:
        """Gathers the value on all workers; with `is_held`, this one holds it,
        in the memory of its host."""
        kept = stored(self.variable)
        assert isinstance(kept, DTensor)
        whole = self._gathered(kept)
        if is_held:
            vars(self.variable)[_HELD] = whole.cpu()

    def release(self) -> torch.Tensor | None:
        """Drops the value that this worker holds, and returns it."""
        held: torch.Tensor | None = vars(self.variable).pop(_HELD, None)
        return held

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
