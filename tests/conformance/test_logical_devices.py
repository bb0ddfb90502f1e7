"""With one logical device a replica, annotations change no tensor."""

import keras
import pytest

from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import tensor


@contract("L-1", "L-2", "L-3", "L-4", native=False)
def test_a_tensor_stays_what_it_is(api, strategy):
    x = tensor([[1.0, 2.0]])

    def annotated(x=x):
        yield strategy.experimental_assign_to_logical_device(x, 0)
        yield strategy.experimental_split_to_logical_devices(x, [1, 1])
        yield strategy.experimental_split_to_logical_devices(x, (1, 1))
        yield strategy.experimental_replicate_to_logical_devices(x)

    inside = strategy.run(lambda: list(annotated()))
    for value in [*inside, *annotated()]:
        for part in local(value):
            assert part.tolist() == [[1.0, 2.0]]


@contract("L-1", native=False)
@pytest.mark.parametrize("logical_device_id", [-1, 1, 7])
def test_an_absent_logical_device_is_refused(api, strategy, logical_device_id):
    with pytest.raises(
        ValueError, match=f"(?s)logical_device_id.*{logical_device_id}"
    ):
        strategy.experimental_assign_to_logical_device(
            tensor(1.0), logical_device_id
        )


@contract("L-1", native=False)
def test_it_is_refused_in_run_as_well(api, two):
    with pytest.raises(ValueError, match="logical_device_id"):
        two.run(
            lambda: two.experimental_assign_to_logical_device(tensor(1.0), 1)
        )


@contract("L-2", native=False)
@pytest.mark.parametrize(
    "dimensions",
    [
        pytest.param([1], id="too few"),
        pytest.param([1, 1, 1], id="too many"),
        pytest.param([1, 2], id="more than there are"),
        pytest.param([1, 3], id="not divisible"),
        pytest.param([1, 0], id="nothing"),
        pytest.param([-1, -1], id="negative"),
        pytest.param([[1, 1]], id="nested"),
    ],
)
def test_an_impossible_split_is_refused(api, strategy, dimensions):
    with pytest.raises(ValueError, match="partition_dimensions"):
        strategy.experimental_split_to_logical_devices(
            tensor([[1.0, 2.0], [3.0, 4.0]]), dimensions
        )


@contract("L-4", native=False)
def test_each_replica_annotates_its_own(api, two):
    x = two.experimental_distribute_values_from_function(
        lambda context: tensor([float(context.replica_id_in_sync_group)])
    )

    def step(x):
        x = two.experimental_split_to_logical_devices(x, [1])
        x = two.experimental_assign_to_logical_device(keras.ops.add(x, x), 0)
        return two.experimental_replicate_to_logical_devices(x)

    assert [part.tolist() for part in local(two.run(step, (x,)))] == [
        [0.0],
        [2.0],
    ]
