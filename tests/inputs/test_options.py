"""Options have defaults, and are refused where they contradict."""

import pytest

from conformance.contract import contract
from keras_dist.core.options import CollectiveCommunication
from keras_dist.core.options import CollectiveHints
from keras_dist.core.options import CommunicationImplementation
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.options import InputOptions
from keras_dist.core.options import InputReplicationMode
from keras_dist.core.options import check_input_options

PER_REPLICA = InputReplicationMode.PER_REPLICA


def test_input_options_are_a_named_tuple():
    options = InputOptions()
    assert options == (True, InputReplicationMode.PER_WORKER, False, 1)
    changed = options._replace(experimental_per_replica_buffer_size=3)
    assert changed == (True, InputReplicationMode.PER_WORKER, False, 3)


@contract(180, native=False)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (InputOptions(None, PER_REPLICA, True), "fetch_to_device` is True"),
        (InputOptions(True, "PER_WORKER", True), "specify `PER_REPLICA`"),
        (InputOptions(True, PER_REPLICA, False, -1), "least 0. Received: -1"),
        (InputOptions(True, PER_REPLICA, False, None), "least 0. .*: None"),
    ],
)
def test_options_that_contradict(options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check_input_options(options)


def test_options_that_fit():
    assert check_input_options(None) == InputOptions()
    placed = InputOptions(False, PER_REPLICA, True)
    assert check_input_options(placed) == placed
    by_name = InputOptions(experimental_replication_mode="PER_REPLICA")
    checked = check_input_options(by_name)
    assert checked.experimental_replication_mode is PER_REPLICA
    with pytest.raises(TypeError, match="Received: {} of type dict"):
        check_input_options({})


def test_communication_options():
    options = CommunicationOptions()
    assert options == (0, None, CommunicationImplementation.AUTO, None)
    options = CommunicationOptions(5, 1.0, "ring")
    assert repr(options) == (
        "CommunicationOptions(bytes_per_pack=5, timeout_seconds=1.0, "
        "implementation=CommunicationImplementation.RING)"
    )
    halved = CommunicationOptions(dtype="bfloat16")
    assert repr(halved).endswith("AUTO, dtype='bfloat16')")
    with pytest.raises(ValueError, match="(?s)'float16'.*Received: 'int8'"):
        CommunicationOptions(dtype="int8")
    with pytest.raises(ValueError, match="Received: -1"):
        CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="of type int"):
        CommunicationOptions(implementation=1)
    with pytest.raises(ValueError, match="(?s)'AUTO', 'RING', 'NCCL'.*'GLOO'"):
        CommunicationOptions(implementation="GLOO")


def test_older_names_of_communication():
    assert CollectiveCommunication is CommunicationImplementation
    hints = CollectiveHints(timeout_seconds=3.0)
    assert isinstance(hints, CommunicationOptions)
    assert hints == (0, 3.0, CommunicationImplementation.AUTO, None)
    with pytest.raises(ValueError, match="bytes_per_pack"):
        CollectiveHints(-1)
