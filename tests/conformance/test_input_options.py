"""Options say where a distributed dataset's parts are, and change no row."""

import numpy as np
import pytest

from conformance.contract import contract
from conformance.data import batched
from conformance.data import count
from conformance.data import distribute
from conformance.data import place
from conformance.helpers import BACKEND
from conformance.helpers import local
from conformance.helpers import numbers

CPUS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def per_replica_options(api, **kwargs):
    return api.InputOptions(
        experimental_replication_mode=api.InputReplicationMode.PER_REPLICA,
        **kwargs,
    )


@contract(179, native=False)
def test_a_mode_is_of_its_dataset_only(api, two):
    two.distribute_datasets_from_function(
        lambda _: batched(count(4), 2), per_replica_options(api)
    )
    for _ in range(10):
        data = distribute(two, count(4), 2)
        assert [numbers(b) for b in data] == [[[0.0], [1.0]], [[2.0], [3.0]]]


@contract(181)
@pytest.mark.parametrize("fetch", [None, True, False])
def test_where_parts_are(api, scoped, fetch, request):
    options = api.InputOptions(experimental_fetch_to_device=fetch)
    data = scoped.experimental_distribute_dataset(batched(count(8), 8), options)
    batch = next(iter(data))
    assert np.concatenate(local(batch)).tolist() == [*range(8)]
    if BACKEND == "torch":
        return  # its virtual devices are one
    parts = batch.values if scoped.num_replicas_in_sync > 1 else (batch,)
    name = request.node.callspec.params["scoped"]
    devices = ["cpu:1"] if name == "one_device" else CPUS[: len(parts)]
    expected = ["cpu:0"] * len(parts) if fetch is False else devices
    assert [place(part) for part in parts] == expected


@contract(184)
def test_the_default_strategy_leaves_data_alone(api):
    strategy = api.get_strategy()
    dataset = batched(count(4), 2)
    assert strategy.experimental_distribute_dataset(dataset) is dataset
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return dataset

    assert strategy.distribute_datasets_from_function(dataset_fn) is dataset
    (context,) = contexts
    assert context.num_input_pipelines == 1
    assert context.num_replicas_in_sync == 1
