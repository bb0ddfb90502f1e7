"""The door to PyTorch's private names for sharded variables.

It is apart from `torch_internals`, because importing these takes long.

| name | why |
|---|---|
| `GroupMember` | workers' default process group is hidden from Keras |
| `_get_module_fsdp_state` | which layers are sharded, and by which model |
| `FSDPState._lazy_init` | the model is the root, whatever is called first |
| `FSDPState._is_root`, `_state_ctx` | a layer may be part of several models |
| `FSDPState._fsdp_param_group` and `s` | a failed step leaves layers whole |
| `post_forward_order`, `_post_forward_indices` | predictions fill them |
| `_orig_dtype`, `_init_mp_dtypes` | frozen layers may be trained later |

If one of them moves, `private` raises an error with its name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard

from keras_dist.plugins import private

GroupMember = private("torch.distributed.distributed_c10d.GroupMember")
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
state_of = private(f"{_STATE}._get_module_fsdp_state")
_State = private(f"{_STATE}.FSDPState")
_Context = private(f"{_STATE}.FSDPStateContext")
private(f"{_STATE}.FSDPState._lazy_init")
private(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
    "._init_mp_dtypes"
)
# In which dtype variables are kept, and in which one layers compute with them.
Dtypes = tuple[torch.dtype, torch.dtype]


class Scatter:
    """A reduce-scatter for FSDP, by a function of a (workers, any) tensor."""

    def __init__(self, sum_of_rows: Callable[[Any], Any]) -> None:
        self._sum_of_rows = sum_of_rows

    def allocate(
        self, size: Any, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: object,
        op: object,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(-1, output_tensor.numel())
        output_tensor.copy_(self._sum_of_rows(rows))


def shard_module(
    module: torch.nn.Module,
    dtypes: Dtypes,
    sum_of_rows: Callable[[Any], Any] | None = None,
    **options: Any,
) -> None:
    """Shards a module whose gradients are summed; its class stays as it is.

    FSDP's class would show in a layer's configuration and in saved files.
    """
    cls = module.__class__
    kept, used = dtypes
    # Sums of gradients are as exact as the variables.
    policy = MixedPrecisionPolicy(
        param_dtype=used, reduce_dtype=kept, cast_forward_inputs=False
    )
    fully_shard(module, reshard_after_forward=True, mp_policy=policy, **options)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if sum_of_rows is not None:
        module.set_custom_reduce_scatter(Scatter(sum_of_rows))
    object.__setattr__(module, "__class__", cls)


def make_root(module: torch.nn.Module) -> None:
    """Makes a sharded module the root of all sharded modules in it."""
    states = _states_in(module)
    for state in states:
        for group in _groups_of(state):
            _note_dtypes(group)
    root = state_of(module)
    if all(state._state_ctx is root._state_ctx for state in states) and (
        root._is_root
    ):
        return
    for state in states:
        state._is_root = None
    root._state_ctx = _Context()
    root._lazy_init()


def _note_dtypes(group: Any) -> None:
    """Looks for dtypes of gradients where there were none, in a first step."""
    if getattr(group, "_orig_dtype", True) is None:
        group._init_mp_dtypes()


def reset(module: torch.nn.Module) -> None:
    """Ends a failed step of a root: its modules' parameters are in parts."""
    root = state_of(module)
    if root is None or not root._is_root:  # no step has begun
        return
    if "_reset_iter_state" in vars(_State):  # from PyTorch 2.13
        root._reset_iter_state()
        return
    for state in _states_in(module):
        for group in _groups_of(state):
            group.reshard()
        state._training_state = type(state._training_state).IDLE
        state._is_root = None


def _groups_of(state: Any) -> list[Any]:
    """Returns what a sharded module gathers together."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def forget_order(module: torch.nn.Module, *_: Any) -> None:
    """Forgets the order of calls without gradients; a hook after a call.

    FSDP gathers in this order in a backward pass, which will not come.
    """
    if torch.is_grad_enabled():
        return
    for state in state_of(module)._state_ctx.all_states:
        state._comm_ctx.post_forward_order.clear()
        for group in _groups_of(state):
            group._post_forward_indices.clear()


def _states_in(module: torch.nn.Module) -> list[Any]:
    states = [state_of(submodule) for submodule in module.modules()]
    return [state for state in states if state is not None]
