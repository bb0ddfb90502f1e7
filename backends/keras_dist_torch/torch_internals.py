"""The one door to PyTorch's private names.

| name | why |
|---|---|
| `torch.utils._pytree` | per-replica values are nests for `torch.compile` |
| `torch._dynamo.disable` | where replicas meet, Python runs as it is |
| `torch._foreach_{add_,copy_,mul}` | one call for many tensors |

If one of them moves, `private` raises an error with its name.
"""

from keras_dist.internals.private_names import private

pytree = private("torch.utils._pytree")

for _name in (
    "torch._dynamo.disable",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_mul",
    "torch.utils._pytree.register_pytree_node",
):
    private(_name)
