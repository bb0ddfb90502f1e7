"""These tests look at PyTorch itself."""

import gc

import keras
import pytest

collect_ignore_glob = [] if keras.backend.backend() == "torch" else ["*.py"]


@pytest.fixture
def live_bytes():
    """A callable: bytes of all tensors alive, each storage once."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    def count():
        gc.collect()
        storages = {
            o.untyped_storage().data_ptr(): o.untyped_storage().nbytes()
            for o in gc.get_objects()
            if issubclass(type(o), torch.Tensor)
            # What the compiler keeps has no memory.
            and not issubclass(type(o), FakeTensor)
            and o.device.type == "cpu"
        }
        return sum(storages.values())

    return count
