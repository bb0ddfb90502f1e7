"""Tensors as flat ones, and back: several in one message, their bytes in one
buffer, and one value's part for each worker."""

import math
from collections.abc import Sequence
from typing import Any

import torch

# Bytes; tensors begin at multiples of this, which kernels are fast for.
_ALIGNMENT = 64


def split_as(
    flat: torch.Tensor, shapes: Sequence[torch.Size]
) -> list[torch.Tensor]:
    """Splits concatenated tensors; what is left is a flat one, at the end."""
    sizes = [*map(torch.Size.numel, shapes)]
    *parts, rest = flat.split([*sizes, flat.numel() - sum(sizes)])
    return [*map(torch.Tensor.reshape, parts, shapes), rest]


def bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Packs the bytes of tensors of any dtypes into one tensor."""
    return torch.cat(
        [
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for tensor in tensors
            if tensor.numel()
        ]
        or [torch.empty(0, dtype=torch.uint8)]
    )


def tensors_of(
    packed: torch.Tensor, like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Unpacks `bytes_of` into tensors of the shapes and dtypes of `like`."""
    parts = packed.split([tensor.nbytes for tensor in like])
    return [
        # A copy, because its bytes may begin where its dtype is not aligned.
        part.clone().view(tensor.dtype).reshape(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def sent_together(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Starts to copy tensors to a device in one buffer; returns the copies."""
    if not tensors:
        return []
    arrangement = Arrangement(tensors)
    flat = arrangement.allocate(tensors[0].device)
    torch._foreach_copy_(arrangement.views(flat), list(tensors))
    return arrangement.views(arrangement.send(flat, device))


def numbers_on(device: torch.device, numbers: Sequence[float]) -> torch.Tensor:
    """Makes a tensor of numbers, without waiting for a GPU's work so far."""
    # A copy from memory that is not pinned waits for it.
    here = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def scalars_on(
    device: torch.device, numbers: Sequence[Any]
) -> list[torch.Tensor]:
    """Returns a list with a flat float32 tensor of numbers and scalar tensors,
    or an empty list of none."""
    if not numbers:
        return []
    plain = [float(x) for x in numbers if not isinstance(x, torch.Tensor)]
    rest = iter(numbers_on(device, plain).unbind() if plain else ())
    return [
        torch.stack(
            [
                number.detach().to(device, torch.float32)
                if isinstance(number, torch.Tensor)
                else next(rest)
                for number in numbers
            ]
        )
    ]


class Arrangement:
    """The offsets of tensors, of any shapes and dtypes, in one byte buffer."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self.num_bytes = 0
        for tensor in tensors:
            start = self.num_bytes
            stop = start + tensor.numel() * tensor.element_size()
            self._places.append((start, stop, tensor.dtype, tensor.shape))
            self.num_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Allocates the buffer; on the host it is pinned if there are GPUs."""
        is_pinned = device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(
            self.num_bytes,
            dtype=torch.uint8,
            device=device,
            pin_memory=is_pinned,
        )

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        # `data`, because views of one tensor share a version counter: autograd
        # would take an in-place change of one for a change of the others.
        return [
            flat[start:stop].view(dtype).view(shape).data
            for start, stop, dtype, shape in self._places
        ]

    def send(self, flat: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Starts to copy a buffer to a device; returns the copy."""
        return self.allocate(device).copy_(flat, non_blocking=True)


class Whole:
    """A value that is not divided: each worker has all of it."""

    is_cut = False

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = torch.Size(shape)
        self.size = self.shape.numel()

    def rows(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        return tensor.reshape(1, -1).expand(count, -1)

    def from_row(self, row: torch.Tensor) -> torch.Tensor:
        return row.view(self.shape)


class Division:
    """The parts of a whole value of some shape: as of `torch.chunk`, one for
    each worker, along one axis."""

    is_cut = True

    def __init__(self, shape: Sequence[int], count: int, index: int) -> None:
        self.shape = torch.Size(shape)
        self.axis = axis = axis_of(shape, count)
        self._length = shape[axis]
        self._others = [*shape[:axis], *shape[axis + 1 :]]
        # Rows are indices along the axis; the last parts may have fewer.
        self._rows = -(-self._length // count)
        self._start = min(self._rows * index, self._length)
        self._count = min(self._rows, self._length - self._start)
        # Elements of the largest part.
        self.size = self._rows * math.prod(self._others)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this worker's part of a whole tensor, which is a view."""
        return whole.detach().narrow(self.axis, self._start, self._count)

    def rows(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """Returns a padded row for each part of a tensor, all or this one's."""
        first = tensor.movedim(self.axis, 0)
        missing = self._rows * count - first.shape[0]
        if missing:
            padding = first.new_zeros(missing, *self._others)
            first = torch.cat([first, padding])
        return first.reshape(count, -1)

    def from_row(self, row: torch.Tensor) -> torch.Tensor:
        """Returns this worker's part from its row."""
        first = row.view(self._rows, *self._others)[: self._count]
        return first.movedim(0, self.axis)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor from the rows of all parts."""
        first = rows.reshape(-1, *self._others)[: self._length]
        return first.movedim(0, self.axis)


def axis_of(shape: Sequence[int], count: int) -> int:
    """Returns the axis to divide: the first that splits into equal parts, since
    parts along a later one are strided.

    Without one it is axis 0, as FSDP divides no other unequally.
    """
    equal = (axis for axis, size in enumerate(shape) if size % count == 0)
    return next(equal, 0)
