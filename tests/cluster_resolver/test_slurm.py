"""`SlurmClusterResolver` finds the tasks, ports and GPUs of a job step."""

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.contract import contract
from keras_dist.cluster_resolver import SlurmClusterResolver
from keras_dist.cluster_resolver import expand_hostlist
from keras_dist.cluster_resolver import expand_tasks_per_node
from keras_dist.errors import ClusterError

HOSTS = "t02n13,t02n41,t02n43"
NO_GPUS = {"gpus_per_node": 1, "gpus_per_task": 1, "auto_set_gpu": False}


@pytest.fixture
def step(environ):
    """Sets what `srun` sets."""

    def set_step(rank, tasks_per_node, hosts=HOSTS, **others):
        tasks = sum(expand_tasks_per_node(tasks_per_node))
        environ.update(
            SLURM_PROCID=str(rank),
            SLURM_STEP_NUM_TASKS=str(tasks),
            SLURM_STEP_NODELIST=hosts,
            SLURM_STEP_TASKS_PER_NODE=tasks_per_node,
            **others,
        )

    return set_step


@contract("R-14")
def test_outside_of_a_step(api, environ, step):
    with pytest.raises(RuntimeError, match="SLURM_PROCID not found in env"):
        api.SlurmClusterResolver()
    step(0, "1(x3)")
    del environ["SLURM_STEP_NODELIST"]
    with pytest.raises(RuntimeError, match="SLURM_STEP_NODELIST not found"):
        api.SlurmClusterResolver()


HOST_LISTS = {
    "n1": "n1",
    "n[1,3]": "n1 n3",
    "n[1-3]": "n1 n2 n3",
    "n1,n2,m[5,7-8],n[0-1,09-11]": "n1 n2 m5 m7 m8 n0 n1 n09 n10 n11",
    "n[0001-0003],m5,o[009-011]": "n0001 n0002 n0003 m5 o009 o010 o011",
    "[1-2]": "1 2",
}


@contract("R-15")
def test_lists_of_slurm(api):
    for short, hosts in HOST_LISTS.items():
        assert api.expand_hostlist(short) == hosts.split()
    assert api.expand_tasks_per_node("2") == [2]
    assert api.expand_tasks_per_node("3(x2),4,1") == [3, 3, 4, 1]
    assert api.expand_tasks_per_node("3(x2),11(x2)") == [3, 3, 11, 11]
    for short in ("n[1-", "n[1-2-3]", "n[a]", ",n1", "n1]"):
        with pytest.raises(ValueError, match="(?s)Invalid .*host"):
            api.expand_hostlist(short)
    for short in ("", "2x3", "2(3)", "a", "2,,3"):
        with pytest.raises(ValueError, match="(?s)Invalid .*tasks.per.node"):
            api.expand_tasks_per_node(short)


@contract("R-15", native=False)
def test_brackets_anywhere():
    hosts = expand_hostlist("node-[1-2].example,r[1-2]n[1-2],m")
    assert hosts[:2] == ["node-1.example", "node-2.example"]
    assert hosts[2:] == ["r1n1", "r1n2", "r2n1", "r2n2", "m"]
    for short in ("n[]", "n[1]]", "", "n1,", "n[1,]"):
        with pytest.raises(ClusterError, match="Received: ") as error:
            expand_hostlist(short)
        assert repr(short) in str(error.value)


_NAMES = st.sampled_from(["n", "gpu-", "node-a"])
_RANGES = st.tuples(
    st.integers(0, 120), st.integers(0, 4), st.integers(1, 4)
).map(lambda t: (t[0], t[0] + t[1], t[2]))


@contract("R-15", native=False)
@given(
    st.lists(
        st.tuples(_NAMES, st.lists(_RANGES, max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_host_lists_come_back(parts):
    short, hosts = [], []
    for prefix, ranges in parts:
        if not ranges:
            short.append(prefix)
            hosts.append(prefix)
            continue
        inner = []
        for first, last, width in ranges:
            first_text = str(first).zfill(width)
            inner.append(f"{first_text}-{last}" if last > first else first_text)
            hosts += [
                prefix + str(number).zfill(len(first_text))
                for number in range(first, last + 1)
            ]
        short.append(f"{prefix}[{','.join(inner)}]")
    assert expand_hostlist(",".join(short)) == hosts


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_tasks_per_node_come_back(tasks):
    groups = []
    for number in tasks:
        if groups and groups[-1][0] == number:
            groups[-1][1] += 1
        else:
            groups.append([number, 1])
    short = ",".join(
        f"{number}(x{times})" if times > 1 else str(number)
        for number, times in groups
    )
    assert expand_tasks_per_node(short) == tasks


@contract("R-16")
def test_workers_by_default(api, environ, step):
    step(0, "1(x3)", CUDA_VISIBLE_DEVICES="0")
    resolver = api.SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]
    }
    assert resolver.master("worker", 0, "grpc") == "grpc://t02n13:8888"
    assert resolver.num_accelerators() == {"GPU": 1}
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"


@contract("R-16")
def test_jobs_and_ports(api, step):
    step(3, "2(x2),1")
    resolver = api.SlurmClusterResolver(
        {"worker": 4, "ps": 1}, port_base=7000, **NO_GPUS | {"gpus_per_node": 2}
    )
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["t02n13:7000"],
        "worker": ["t02n13:7001", "t02n41:7000", "t02n41:7001", "t02n43:7000"],
    }
    assert resolver.get_task_info() == ("worker", 2)
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)


@contract("R-16")
def test_tasks_per_node_as_an_argument(api, environ, step):
    step(0, "1(x3)")
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    same = api.SlurmClusterResolver(tasks_per_node=1, **NO_GPUS)
    assert same.cluster_spec().num_tasks("worker") == 3
    step(0, "2,1", hosts="a,b")
    by_host = api.SlurmClusterResolver(
        tasks_per_node={"b": 1, "a": 2}, **NO_GPUS | {"gpus_per_node": 2}
    )
    assert by_host.cluster_spec().as_dict() == {
        "worker": ["a:8888", "a:8889", "b:8888"]
    }


@contract("R-16")
def test_master_and_protocol(api, step):
    step(0, "1(x3)")
    resolver = api.SlurmClusterResolver({"ps": 1, "worker": 2}, **NO_GPUS)
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://t02n43:8888"
    resolver.rpc_layer = "ab"
    assert resolver.master("ps", 0) == "ab://t02n13:8888"
    assert resolver.master("ps", 0, rpc_layer="cd") == "cd://t02n13:8888"


@contract("R-16")
def test_more_than_there_is(api, step):
    step(0, "2(x2),1")
    with pytest.raises(RuntimeError, match="6 tasks but only 5 were assigned"):
        api.SlurmClusterResolver({"worker": 6}, gpus_per_node=2)
    with pytest.raises(RuntimeError, match="more GPUs per node than available"):
        api.SlurmClusterResolver(gpus_per_node=2, gpus_per_task=2)


@contract("R-16", native=False)
@pytest.mark.parametrize("tasks_per_node", [None, 1, {"n10": 1, "n2": 1}])
def test_hosts_are_in_the_order_of_ranks(step, tasks_per_node):
    step(1, "1(x2)", hosts="n[2,10]")
    resolver = SlurmClusterResolver(tasks_per_node=tasks_per_node)
    # It is known from the start.
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.cluster_spec() == {"worker": ["n2:8888", "n10:8888"]}
    assert resolver.master() == "grpc://n10:8888"


def test_ranks_that_go_round_the_nodes(step):
    step(1, "2,2", hosts="a,b", SLURM_NODEID="1", SLURM_LOCALID="0")
    with pytest.raises(
        ClusterError, match="(?s)PROCID=1 .*--distribution=block"
    ):
        SlurmClusterResolver()
    step(2, "2,2", hosts="a,b", SLURM_NODEID="1", SLURM_LOCALID="0")
    assert SlurmClusterResolver().master() == "grpc://b:8888"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_PROCID": "9"}, "SLURM_PROCID=9 .*Expected: 0 to 2"),
        ({"SLURM_PROCID": "a"}, "SLURM_PROCID must be an integer .*'a'"),
        ({"SLURM_STEP_NODELIST": "a,b"}, "names 2 hosts, but .* 3 numbers"),
        ({"SLURM_STEP_NODELIST": "a["}, r"Invalid list of hosts.*'a\['"),
    ],
)
def test_variables_that_do_not_fit(environ, step, variables, message):
    step(0, "1(x3)")
    environ.update(variables)
    with pytest.raises(ClusterError, match=f"(?s){message}"):
        SlurmClusterResolver()


def _ports(step, tasks_per_node="2", **ids):
    step(0, tasks_per_node, hosts="a", **ids)
    addresses = SlurmClusterResolver().cluster_spec().job_tasks("worker")
    return {int(address.rpartition(":")[2]) for address in addresses}


@pytest.mark.parametrize("tasks_per_node", ["1", "2", "3", "8"])
def test_jobs_and_steps_that_share_a_node_share_no_port(step, tasks_per_node):
    taken = set()
    for job in range(1000, 1020):
        for number in range(20):
            ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(number)}
            ports = _ports(step, tasks_per_node, **ids)
            assert not ports & taken
            assert min(ports) >= 10240
            assert max(ports) < 26624
            taken |= ports


def test_ports_that_were_asked_for(step):
    step(0, "3", hosts="a", SLURM_JOB_ID="70")
    resolver = SlurmClusterResolver(port_base=8888)
    ports = [f"a:{port}" for port in (8888, 8889, 8890)]
    assert resolver.cluster_spec() == {"worker": ports}
    with pytest.raises(ClusterError, match="(?s)port_base=65534 .* port 65536"):
        SlurmClusterResolver(port_base=65534).cluster_spec()


def test_a_job_has_a_word(step):
    step(0, "2", hosts="a")
    words = {SlurmClusterResolver().job}
    assert words == {""}  # without a job there is none
    first = {"SLURM_JOB_ID": "70", "SLURM_STEP_ID": "0"}
    for ids in (
        first,
        first | {"SLURM_JOB_ID": "71"},
        first | {"SLURM_STEP_ID": "1"},
        first | {"SLURM_RESTART_COUNT": "1"},
    ):
        step(0, "2", hosts="a", **ids)
        words.add(SlurmClusterResolver().job)
    assert len(words) == 5
    assert "SLURM job 70, step 0, restart 1" in words


@contract("R-17")
@pytest.mark.parametrize(
    ("per_task", "own"), [(1, "1"), (2, "2,3")], ids=["one", "two"]
)
def test_own_gpus_are_set(api, environ, step, per_task, own):
    step(1, "2(x2),1", CUDA_VISIBLE_DEVICES="")
    resolver = api.SlurmClusterResolver(
        gpus_per_node=2 * per_task, gpus_per_task=per_task
    )
    resolver.cluster_spec()
    assert environ["CUDA_VISIBLE_DEVICES"] == own
    assert resolver.num_accelerators("worker", 0) == {"GPU": per_task}


@contract("R-17", native=False)
@pytest.mark.parametrize(
    ("visible", "own"),
    [
        ("0,1,2,3", "2,3"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d"),
        ("2,3", "2,3"),
        ("0", "0"),
        (None, "2,3"),
        # The user hides them.
        ("-1", "-1"),
    ],
)
def test_own_gpus_are_some_of_those_that_are_visible(
    environ, step, visible, own
):
    step(1, "2(x2),1", SLURM_GPUS_ON_NODE="4")
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    for _ in range(2):
        resolver = SlurmClusterResolver()
        resolver.cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == own
        if own != "-1":
            assert resolver.num_accelerators() == {"GPU": 2}


@contract("R-17", native=False)
def test_without_gpus_nothing_is_set(environ, step):
    step(1, "2(x2),1", CUDA_VISIBLE_DEVICES="-1")
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == 5
    assert environ["CUDA_VISIBLE_DEVICES"] == "-1"
    assert resolver.num_accelerators() == {"GPU": 0}


@pytest.fixture
def nvidia_smi(environ, tmp_path):
    """Puts a command of that name, and no other, in the way."""
    environ["PATH"] = str(tmp_path)

    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return make


def test_gpus_are_counted(environ, step, nvidia_smi):
    step(0, "1(x3)")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 0}
    nvidia_smi("echo 'no driver' >&2; exit 9")
    with pytest.raises(
        RuntimeError, match="(?s)Pass `gpus_per_node`.*no driver"
    ):
        SlurmClusterResolver()
    nvidia_smi("echo 'GPU 0: A (UUID: a)'; echo 'GPU 1: A (UUID: b)'")
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 2}
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
