"""The private names of Keras that distributed input needs are there.

A failure here means that Keras moved something: the table in
`keras_dist/internals/keras_data.py` says what each is for.
"""

import inspect

import keras
import numpy as np
import pytest

from keras_dist.internals import keras_data
from keras_dist.internals import keras_internals
from parity.kinds import Batches
from parity.kinds import slices


@pytest.mark.smoke
def test_adapters_are_as_we_extend_them():
    adapter = keras_data.GeneratorDataAdapter(
        iter([(np.zeros(2),), (np.ones(2),), (np.ones(2),)])
    )
    assert len(adapter._first_batches) == 2
    assert len(list(adapter.generator())) == 3


@pytest.mark.smoke
def test_what_tells_data_apart():
    for name in ("tf_dataset", "torch_dataloader", "grain_dataset"):
        assert not getattr(keras_data, f"is_{name}")([])
    assert not keras_internals.in_tf_graph()


@pytest.mark.smoke
def test_workers_read_in_order():
    enqueuer = keras_data.OrderedEnqueuer
    parameters = inspect.signature(enqueuer).parameters
    assert {"workers", "use_multiprocessing", "max_queue_size"} <= {*parameters}
    dataset = Batches(slices(np.arange(20), 2), workers=3, max_queue_size=2)
    assert isinstance(dataset, keras.utils.PyDataset)
    read = [batch[0] for batch in keras_data.read_with_workers(dataset)]
    assert read == [*range(0, 20, 2)]
