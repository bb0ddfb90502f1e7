"""Code of a user's own on `DTensor`s: its numbers are those of all parts.

PyTorch gives the number of one worker's part where Python asks for that of a
sum, and computes a few operations for the wrong axis. An optimizer or a
constraint that is not Keras' own runs in this mode, which asks first.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

_Tensor = torch.Tensor
# What leaves tensors for Python, or is wrong for parts of different sizes.
_OF_WHOLES = {
    *(_Tensor.item, _Tensor.tolist, _Tensor.numpy),
    *(_Tensor.__float__, _Tensor.__int__, _Tensor.__bool__),
    *(_Tensor.__index__, _Tensor.__complex__, _Tensor.__array__),
    _Tensor.__format__,
    torch.nn.functional.mse_loss,
}
# What takes an axis counted from the end for another one.
_ALONG_AN_AXIS = {
    *(torch.cumsum, torch.cumprod, torch.logcumsumexp),
    *(_Tensor.cumsum, _Tensor.cumprod, _Tensor.logcumsumexp),
}


class Exactly(TorchFunctionMode):
    """Gathers a `DTensor` where PyTorch would use this worker's part alone.

    All workers have to run the same code inside.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_WHOLES:
            args = [*map(_whole, args)]
        elif func in _ALONG_AN_AXIS and isinstance(args[0], DTensor):
            args, kwargs = _from_the_start(*args, **kwargs)
        return func(*args, **kwargs)


def _whole(value: object) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _from_the_start(
    tensor: DTensor, dim: int, **kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    axis = dim % tensor.ndim if tensor.ndim else dim
    return [tensor, axis], kwargs
