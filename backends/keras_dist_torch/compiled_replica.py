"""A worker's only replica in a compiled graph, and the sums over workers there.

A sum is one operation of the graph, which the compiler does not look into. So
it takes the same way as those of other steps.
"""

import pathlib
import weakref
import zlib
from collections.abc import Callable
from typing import Any
from typing import NoReturn
from typing import TypeVar

import keras
import torch

from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import RowShard
from keras_dist_torch.draws import ones_like
from keras_dist_torch.keras_internals import has_no_seed
from keras_dist_torch.workers import TorchWorkers

T = TypeVar("T")

# A graph holds no objects, so its sums find the process' workers here.
_workers: "weakref.WeakValueDictionary[str, TorchWorkers]" = (
    weakref.WeakValueDictionary()
)


# PyTorch keeps graphs on disk by the names of their operations. So these change
# with this module, which has their gradients.
_SPACE = f"keras_dist_{zlib.crc32(pathlib.Path(__file__).read_bytes()):x}"


@torch.library.custom_op(f"{_SPACE}::all_sum", mutates_args=())  # type: ignore[untyped-decorator]
def _all_sum(value: torch.Tensor, what: str) -> torch.Tensor:
    total: torch.Tensor = _workers["own"].sum([value], what=what)[0]
    # An operation may not return what it was given.
    return total.clone() if total is value else total


@_all_sum.register_fake  # type: ignore[untyped-decorator]
def _like(value: torch.Tensor, what: str) -> torch.Tensor:
    return torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.what = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    # Of a loss that has the replica's weight already.
    return _all_sum(gradient.contiguous(), f"the gradient of {ctx.what}"), None


_all_sum.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op(f"{_SPACE}::mask_of_dropout", mutates_args=())  # type: ignore[untyped-decorator]
def _mask_of_dropout(
    inputs: torch.Tensor, before: torch.Tensor, rate: float, shares: list[int]
) -> torch.Tensor:
    rows, start, total = shares
    times = inputs.shape[0] // rows
    ones = ones_like(inputs, [times * total, *inputs.shape[1:]])
    whole = torch.nn.functional.dropout(ones, rate)
    return whole[times * start : times * (start + rows)].clone()


@_mask_of_dropout.register_fake  # type: ignore[untyped-decorator]
def _like_inputs(
    inputs: torch.Tensor, before: torch.Tensor, rate: float, shares: list[int]
) -> torch.Tensor:
    return ones_like(inputs, list(inputs.shape))


class CompiledReplica(Replica):
    """The only replica of a worker, the loss of which has its weight."""

    is_only = True

    def __init__(
        self, share: RowShard, workers: TorchWorkers, first: int
    ) -> None:
        super().__init__(0, share, ReplicaGroup(workers, first))
        # The last mask of a dropout in a graph, while it is made.
        self.mask: torch.Tensor | None = None
        self.num_masks = 0
        _workers["own"] = workers

    def all_sum(self, what: str, value: Any, total: object = None) -> Any:
        return _all_sum(value, what)

    def all_reduce(self, what: str, value: Any) -> Any:
        return _all_sum(value.detach(), what)

    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: object
    ) -> T:
        refuse(what)

    def draw_traced(
        self,
        original: Callable[..., Any],
        inputs: Any,
        rate: float = 0.5,
        noise_shape: object = None,
        seed: object = None,
    ) -> Any:
        """Draws the mask of a dropout for all rows, and applies its own part.

        Each mask is given the one before it: graphs keep that order."""
        is_unseeded = seed is None or has_no_seed(seed)
        if (
            original.__name__ != "dropout"
            or not is_unseeded
            or noise_shape is not None
        ):
            refuse("a random draw")
        if rate in (0, 1):
            return original(inputs, rate, noise_shape, seed)
        share = self.share
        rows = [share.rows, share.start, share.total]
        before = inputs.new_zeros(()) if self.mask is None else self.mask
        self.num_masks += 1
        self.mask = _mask_of_dropout(inputs.detach(), before, rate, rows)
        return inputs * self.mask

    @property
    def seed_offset(self) -> Any:
        refuse("a random draw")

    def read(self, variable: keras.Variable) -> Any:
        return variable.value

    def hold(self, variable: keras.Variable, value: object) -> None:
        variable.assign(value)


def refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"A compiled step has come to {what}, which it had not done before it "
        "was compiled. Expected: steps that all do the same. Pass "
        "`jit_compile=False` to `compile`."
    )
