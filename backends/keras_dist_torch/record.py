"""TorchRecord: the value of one variable, and what goes with it to others.

| a variable | its value is in | set in |
|---|---|---|
| whole | Keras' own tensor, `variable._value` | Keras |
| whole, sent to other devices | a `Pack` too, which it views | `transfers` |
| in parts | `parts`, of which this worker has its own | `parts` |
| in parts, while its layer computes | `tensor`, whole | `units` |
| in parts, while files are used | `host_copy` too, on the chief | `parts` |
"""

from typing import Any

import torch

from keras_dist.plugins import VariableRecord


class TorchRecord(VariableRecord):
    """The backend's notes on one variable."""

    attribute = "_keras_dist_torch_storage"
    # Whether it belongs in parts, and its whole value is the same on all
    # workers: slots of sharded variables, and weights that are not trained.
    is_marked = False
    # The `DTensor` of a sharded variable; `tensor` is that, or the whole value
    # while FSDP has its layer compute.
    parts: Any = None
    tensor: torch.Tensor | None = None
    # A whole value that this worker holds in the memory of its host.
    host_copy: torch.Tensor | None = None
    # The `Division` of its value. If only its slots are in parts, `parts` is a
    # view of the whole value, whose memory was at an address.
    division: Any = None
    address = 0
    # The `Order` in which its gradient is sent to workers, and its place there.
    order: tuple[Any, int] = (None, 0)
    # The `Pack` in which it is sent to other devices, and its place there.
    pack: tuple[Any, int] = (None, 0)
