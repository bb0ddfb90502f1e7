"""The door to private names of PyTorch's `DTensor`.

It is apart from `torch_internals`, because importing it takes long.

| name | why |
|---|---|
| `torch.distributed.tensor._dispatch` | a warning of numbers is not given |
| `DTensor._op_dispatcher` | whether `implicit_replication` is in use already |

If one of them moves, `private` raises an error with its name.
"""

from keras_dist.plugins import private

dispatch = private("torch.distributed.tensor._dispatch")
dispatcher = private("torch.distributed.tensor.DTensor._op_dispatcher")
