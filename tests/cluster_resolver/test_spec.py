"""`ClusterSpec` has a cluster's addresses by job, as the original has."""

import copy
import pickle

import pytest

from cluster_resolver.helpers import SPEC
from conformance.contract import contract
from keras_dist.cluster_resolver import ClusterSpec
from keras_dist.errors import ClusterError

SPARSE = {"worker": {1: "worker1:2222", 3: "worker3:2222"}}


@contract("R-1")
def test_lists(api):
    spec = api.ClusterSpec(SPEC)
    assert spec
    assert spec.jobs == ["ps", "worker"]
    assert spec.as_dict() == SPEC
    assert spec.num_tasks("worker") == 3
    assert spec.task_indices("ps") == [0, 1]
    assert spec.task_address("worker", 2) == "worker2:2222"
    assert spec.job_tasks("ps") == SPEC["ps"]
    assert repr(spec) == f"ClusterSpec({SPEC})"


@contract("R-1")
def test_dicts_by_index(api):
    spec = api.ClusterSpec(SPARSE)
    assert spec.as_dict() == SPARSE
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [
        None,
        "worker1:2222",
        None,
        "worker3:2222",
    ]
    full = api.ClusterSpec({"worker": {"1": "b:1", "0": "a:1"}})
    assert full.as_dict() == {"worker": ["a:1", "b:1"]}


@contract("R-1")
def test_equality_and_emptiness(api):
    assert api.ClusterSpec(SPEC) == api.ClusterSpec(SPEC)
    assert api.ClusterSpec(SPEC) == api.ClusterSpec(api.ClusterSpec(SPEC))
    assert api.ClusterSpec(SPEC) != api.ClusterSpec(SPARSE)
    assert not api.ClusterSpec({})
    assert api.ClusterSpec({"worker": []}).as_dict() == {"worker": {}}
    with pytest.raises(TypeError, match="unhashable"):
        hash(api.ClusterSpec(SPEC))


@contract("R-1")
@pytest.mark.parametrize(
    "cluster",
    [["a:1"], "a:1", None, {"worker": "a:1"}, {"worker": [1]}, {1: ["a:1"]}],
)
def test_other_things_are_no_cluster(api, cluster):
    with pytest.raises(TypeError):
        api.ClusterSpec(cluster)


@contract("R-8")
def test_what_is_not_there(api):
    spec = api.ClusterSpec(SPARSE)
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
            ask("ps")
    with pytest.raises(ValueError, match="No task with index 2 in job"):
        spec.task_address("worker", 2)


def test_it_equals_what_makes_it_and_its_copies():
    assert ClusterSpec(SPEC) == SPEC
    assert ClusterSpec(SPARSE) == SPARSE
    assert ClusterSpec(SPEC) != {"worker": 3}
    assert ClusterSpec(SPEC) != [SPEC]
    spec = ClusterSpec(SPARSE)
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)
    empty = ClusterSpec({"worker": []})
    assert (empty.job_tasks("worker"), empty.num_tasks("worker")) == ([], 0)
    for index in ("first", -1, None):
        with pytest.raises(ClusterError, match=f"(?s)at least 0. .*{index!r}"):
            ClusterSpec({"worker": {index: "a:1"}})


@contract("R-1")
def test_a_spec_of_the_original_is_taken(api):
    assert ClusterSpec(api.ClusterSpec(SPARSE)) == SPARSE
