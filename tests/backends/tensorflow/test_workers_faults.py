"""Workers say why they end or can't begin, and end one by one."""

import re

import pytest
import worker_cases

import keras_dist
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.errors import ClusterError
from keras_dist.launch.addresses import free_addresses
from keras_dist.plugin.backend import get_backend
from keras_dist_tensorflow.cluster import await_names
from workers.test_signals import LIMIT
from workers.test_signals import start  # noqa: F401


def test_an_error_of_one_worker_is_told_to_the_others_at_once(
    start,  # noqa: F811
):
    """Long before the timeout of a collective."""
    told, _ = start("raise").communicate(timeout=LIMIT)
    assert re.search(r"worker 1 at \S+ ended with KeyError: 'its own'", told)


def test_workers_end_one_after_the_other(capfd):
    found = keras_dist.launch(
        worker_cases.ends, workers=2, devices=1, timeout=LIMIT
    )
    assert found == [2.0] * 2
    shown = capfd.readouterr()
    assert "StartAbort" not in shown.out + shown.err


def refused(addresses, index=0):
    """What is said of addresses that can't be used."""
    cluster = Cluster(index, addresses[0], tuple(addresses))
    with pytest.raises(ClusterError) as caught:
        await_names(cluster, 1)
    return str(caught.value)


@pytest.mark.parametrize("unknown", [0, 1], ids=["own", "other"])
def test_an_unknown_host_is_refused(unknown):
    addresses = free_addresses(2)
    addresses[unknown] = "no-such-host.invalid:9000"
    message = refused(addresses)
    assert f"The host of worker {unknown} is unknown" in message
    assert addresses[unknown] in message


def test_workers_are_joined_before_tensorflow_starts():
    keras_dist.list_devices()
    addresses = tuple(free_addresses(2))
    cluster = Cluster(0, addresses[0], addresses)
    with pytest.raises(RuntimeError, match="joined at program startup"):
        get_backend().join(cluster, CommunicationOptions())


def test_a_cluster_of_one_worker_needs_no_server():
    addresses = tuple(free_addresses(1))
    cluster = Cluster(0, addresses[0], addresses)
    get_backend().join(cluster, CommunicationOptions())
    devices = tuple(get_backend().list_devices())[:2]
    plan = Plan(tuple((device,) for device in devices), devices, cluster)
    assert get_backend().executor(plan).workers is None
