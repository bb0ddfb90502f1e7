"""Data that can't be distributed is refused by name."""

import keras
import numpy as np
import pytest

from conformance.contract import contract
from inputs.helpers import PER_REPLICA
from inputs.helpers import distributed
from inputs.helpers import from_function
from inputs.helpers import lists
from keras_dist.inputs.sources.numpy_data import numpy_dataset


@contract(175, native=False)
@pytest.mark.parametrize(
    "data",
    [
        np.ones((4, 2)),
        (np.ones((4, 2)), np.ones(4)),
        {"x": np.ones((4, 2))},
        keras.ops.ones((4, 2)),
    ],
    ids=["array", "tuple", "dict", "tensor"],
)
def test_arrays_have_no_batch_size(data):
    with pytest.raises(ValueError, match="(?s)batch first.*make_numpy_dataset"):
        distributed(data, 2)


def test_what_is_no_data():
    with pytest.raises(ValueError, match="Received: 7 of type int"):
        distributed(7, 2)
    with pytest.raises(ValueError, match="(?s)from_function.*Received: None"):
        from_function(lambda _: None, 2)


def test_distributed_twice():
    data = distributed([np.ones(2)], 2)
    with pytest.raises(ValueError, match="distributed already"):
        distributed(data, 2)
    with pytest.raises(ValueError, match="distributed already"):
        from_function(lambda _: data, 2)


@contract(174, native=False)
def test_unbatched_rows():
    rows = numpy_dataset((np.arange(4), np.arange(4)))
    with pytest.raises(ValueError, match="(?s)not batched.*batch first"):
        next(iter(distributed(rows, 2)))
    assert [lists(x)[0] for x, _ in distributed(rows, 1)] == [0, 1, 2, 3]


class Sparse:
    shape, dtype = (4, 2), "float32"


ROWS = np.ones((4, 2))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": ROWS, "y": [ROWS, 3.0]}, r"leaf `\['y'\]\[1\]` of shape \(\)"),
        ((ROWS, np.ones(3)), r"leaf `\[1\]` of shape \(3,\)"),
        ((None, None), "batch first"),
        ((np.ones(2), np.array([{}, {}])), r"leaf `\[1\]` .*dtype object"),
        ({"x": Sparse()}, r"leaf `\['x'\]` .*, a Sparse"),
    ],
)
def test_leaves_that_can_not_be_cut(batch, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        list(distributed([batch], 2))


def test_a_dataset_for_each_replica_needs_a_function():
    with pytest.raises(
        NotImplementedError, match="distribute_datasets_from_function"
    ):
        distributed([np.ones(2)], 2, PER_REPLICA)
