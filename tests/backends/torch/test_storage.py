"""What goes with a variable is gone with it."""

import gc
import weakref

import keras
import torch

from keras_dist.experimental import CommunicationOptions
from keras_dist_torch.buckets import Order
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.transfers import Pack
from parity.harness import central


def test_it_is_gone_with_its_variable():
    """At once: a cycle would keep memory until garbage is collected."""
    with central(2).scope():
        variable = keras.Variable([1.0, 2.0])
    Pack([variable], torch.device("cpu"))
    Order([variable], CommunicationOptions())
    storage = TorchRecord.of(variable)
    assert storage is TorchRecord.of(variable)
    assert isinstance(storage.pack[0], Pack)
    assert isinstance(storage.order[0], Order)
    gone = [weakref.ref(each) for each in (storage, storage.pack[0])]
    del storage
    gc.collect()
    gc.disable()
    try:
        del variable
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
