"""The memory count of `keras-dist bench memory` on PyTorch."""

import gc

import keras
import torch

from keras_dist.core.device import Device
from keras_dist.fit.binding import binding_of
from keras_dist.internals.keras_internals import all_variables
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.pieces import ShardedVariable

TEXT = (
    "Measured: the storage of every live tensor of the process, once. "
    "PyTorch has one CPU: its virtual devices share memory, and what several "
    "of them use is there once, counted on the first. Plain Keras has the "
    "gradients of the last step until the next one."
)


def live_bytes(model: keras.Model) -> dict[Device, int]:
    """Counts the bytes of live storages by device.

    Storages on the CPU count for the virtual device whose variable they hold.
    """
    keepers = _keepers(model)
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not each.is_meta:
            storage = each.untyped_storage()
            key = each.device, storage.data_ptr()
            storages[key] = storage.nbytes()
    totals: dict[Device, int] = {}
    for (device, pointer), num_bytes in storages.items():
        if device.type == "cuda":
            keeper = Device("gpu", device.index or 0)
        else:
            keeper = keepers.get(pointer, Device("cpu", 0))
        totals[keeper] = totals.get(keeper, 0) + num_bytes
    return totals


def _keepers(model: keras.Model) -> dict[int, Device]:
    """Maps the addresses of the variables' storages to their devices."""
    binding = binding_of(model)
    if binding is None:
        return {}
    strategy = binding.strategy
    keepers = {}
    for variable in all_variables(model):
        devices = strategy.executor.devices_of(variable)
        # A variable in parts has a tensor for each device, any other one
        # tensor: it counts for the first device.
        for tensor, device in zip(_tensors(variable), devices, strict=False):
            keepers[tensor.untyped_storage().data_ptr()] = device
    return keepers


def _tensors(variable: keras.Variable) -> list[torch.Tensor]:
    if isinstance(variable, ShardedVariable):
        tensors: list[torch.Tensor] = variable._pieces.tensors
        return tensors
    parameter = parameter_of(variable)
    return [] if parameter is None else [parameter]
