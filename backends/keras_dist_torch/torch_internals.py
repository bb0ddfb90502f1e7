"""The one door to PyTorch's private names.

| name | why |
|---|---|
| `torch.utils._pytree` | per-replica values are nests for `torch.compile` |
| `torch._dynamo.config` | a learning rate that changes compiles nothing again |
| `torch._dynamo.disable` | where replicas meet, Python runs as it is |
| `torch._C._profiler._ExperimentalConfig` | profiles of all threads |
| `torch._C._current_graph_task_id` | a draw knows that it is in a backward |
| `torch._foreach_{add_,copy_,mul}` | one call for many tensors |
| `clip_grad._clip_grads_with_norm_` | clips gradients, in some versions |

If one of them moves, `private` raises an error with its name.
"""

from keras_dist.plugins import private

pytree = private("torch.utils._pytree")
config = private("torch._dynamo.config")

CLIPS = "_clip_grads_with_norm_"
_backward_id = private("torch._C._current_graph_task_id")
_ProfilerConfig = private("torch._C._profiler._ExperimentalConfig")

for _name in (
    "torch._dynamo.disable",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_mul",
    "torch.utils._pytree.register_pytree_node",
):
    private(_name)


def of_all_threads() -> object:
    """Returns the setting of a profile of all threads."""
    return _ProfilerConfig(profile_all_threads=True)


def is_in_backward() -> bool:
    """Returns whether this thread runs a backward pass."""
    return bool(_backward_id() != -1)
