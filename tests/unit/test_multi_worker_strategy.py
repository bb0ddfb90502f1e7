"""`MultiWorkerMirroredStrategy` where there is only one worker."""

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
def test_the_older_spelling():
    options = keras_dist.experimental.CommunicationImplementation.RING
    with pytest.warns(DeprecationWarning, match="MultiWorkerMirroredStrategy"):
        strategy = keras_dist.experimental.MultiWorkerMirroredStrategy(options)
    assert isinstance(strategy, keras_dist.MultiWorkerMirroredStrategy)


def test_what_is_no_resolver_is_refused():
    with pytest.raises(TypeError, match="cluster_resolver.*'a:9000'"):
        keras_dist.MultiWorkerMirroredStrategy("a:9000")


def test_what_are_no_options_is_refused():
    with pytest.raises(TypeError, match="communication_options"):
        keras_dist.MultiWorkerMirroredStrategy(communication_options="RING")
