"""`MultiWorkerMirroredStrategy` works where there is only one worker."""

import json

import pytest

import keras_dist
from conformance.contract import contract

CLUSTERS = {
    "none": None,
    "empty": {},
    "one": {
        "cluster": {"worker": ["127.0.0.1:1"]},
        "task": {"type": "worker", "index": 0},
    },
    "evaluator": {
        "cluster": {
            "worker": ["127.0.0.1:1", "127.0.0.1:2"],
            "evaluator": ["127.0.0.1:3"],
        },
        "task": {"type": "evaluator", "index": 0},
    },
}


@contract(221, 225, native=False)
@pytest.mark.parametrize("name", CLUSTERS)
def test_it_works_alone(name, monkeypatch):
    if CLUSTERS[name] is not None:
        monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTERS[name]))
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    count = len(keras_dist.list_devices())
    assert strategy.num_replicas_in_sync == count
    assert strategy.plan.cluster is None
    assert strategy.extended.should_checkpoint
    assert strategy.extended.should_save_summary
    total = strategy.run(
        lambda: keras_dist.get_replica_context().all_reduce("SUM", 1.0)
    )
    assert {float(t) for t in strategy.experimental_local_results(total)} == {
        float(count)
    }


@contract(222, native=False)
def test_what_it_takes():
    make = keras_dist.MultiWorkerMirroredStrategy
    options = keras_dist.experimental.CommunicationImplementation.RING
    # The older spelling.
    with pytest.warns(DeprecationWarning, match="MultiWorkerMirroredStrategy"):
        strategy = keras_dist.experimental.MultiWorkerMirroredStrategy(options)
    assert isinstance(strategy, make)
    with pytest.raises(TypeError, match="(?s)cluster_resolver.*'a:9000'"):
        make("a:9000")
    with pytest.raises(TypeError, match="communication_options"):
        make(communication_options="RING")
