"""`keras-dist info` tells what works and what is broken, and no secrets."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import keras
import pytest

from keras_dist.cli import info as report
from keras_dist.cli.child import ChildError
from keras_dist.cli.variables import Masks
from keras_dist.cli.variables import cluster_variables
from keras_dist.cli.variables import other_variables
from keras_dist.environment import packages
from keras_dist.environment import versions

BACKEND = keras.backend.backend()
CLUSTER = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": {"worker": ["alpha.corp:9000", "10.1.2.3:9001"]},
            "task": {"type": "worker", "index": 1},
        }
    ),
}
HERE = packages.InstalledBackend(BACKEND, "plugin:Backend", True)
ABSENT = packages.InstalledBackend(
    "absent_engine", "absent_engine:Backend", False
)


class OfVersion3(packages.InstalledBackend):
    version = "3.0"


BROKEN = OfVersion3("broken_engine", "broken_engine:Backend", True)


@pytest.fixture
def world(invoke, monkeypatch, tmp_path):
    """A machine with what a test says; other variables are its own."""
    for name in (*cluster_variables(), "KERAS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    (tmp_path / "broken_engine.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def tell(*backends, **variables):
        monkeypatch.setattr(report, "backends", lambda: list(backends))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return invoke("info --timeout 250")

    return tell


def test_the_command_tells_programs():
    finished = subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "info", "--json"]
        + ["--timeout", "250"],
        env=os.environ
        | CLUSTER
        | {"KERAS_BACKEND": BACKEND, "KERAS_DIST_VIRTUAL_DEVICES": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found["keras"] == keras.__version__
    assert found["keras_dist"] == version("keras-dist")
    assert found["picked"]["backend"] == BACKEND
    assert found["picked"]["commands_take"] == BACKEND
    assert not found["picked"]["problem"]
    by_name = {each["name"]: each for each in found["backends"]}
    assert {"jax", "tensorflow", "torch"} <= set(by_name)
    own = by_name[BACKEND]
    assert own["works"]
    assert own["version"] == version(BACKEND)
    assert own["support"] == found["keras_support"] == "tested"
    cpus = [name for name in own["devices"] if name.startswith("cpu:")]
    assert cpus == ["cpu:0", "cpu:1", "cpu:2"]
    assert found["virtual_devices"] == "3"
    cluster = found["cluster"]
    assert cluster["reason"] == "TF_CONFIG is set: 2 workers, this is worker 1"
    assert (cluster["workers"], cluster["index"]) == (2, 1)
    assert "alpha" not in finished.stdout and "10.1.2.3" not in finished.stdout
    assert "host1:9000" in cluster["variables"]["TF_CONFIG"]
    assert found["variables"]["KERAS_BACKEND"] == BACKEND


def test_a_backend_that_is_broken_or_absent_is_told_with_its_fix(world):
    result = world(HERE, ABSENT, BROKEN, KERAS_BACKEND="broken_engine")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "absent_engine: not installed. Try: pip install" in text
    assert "'keras-dist[absent_engine]'" in text
    assert "broken_engine: can't be used" in text
    assert "pip install --force-reinstall 'keras-dist[broken_engine]'" in text
    assert "Problem: broken_engine: can't be used" in text
    assert HERE.version in text
    assert "this is the only worker" in text


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("it begins\nit ends", "it ends"),
        (
            'Traceback:\n  File "a.py", line 1\n    f()\nValueError: Bad.\n'
            "Received: 3.",
            "ValueError: Bad. Received: 3.",
        ),
    ],
)
def test_a_process_that_failed_is_told_by_its_last_error(output, error):
    assert ChildError("it ended", output, True).summary == f"it ended: {error}"


@pytest.mark.parametrize(
    ("asked", "support"),
    [("<99", "tested"), ("<0.2", "untested"), (">=99.0", "too old")],
)
def test_what_is_known_of_versions(world, monkeypatch, asked, support):
    lines = [f"keras{asked}", f"broken_engine{asked}"]
    monkeypatch.setattr(versions, "requires", lambda name: lines)
    versions.tested_versions.cache_clear()
    text = " ".join(world(BROKEN).output.split())
    versions.tested_versions.cache_clear()
    assert f"Keras {keras.__version__} ({support})" in text
    assert f"broken_engine 3.0 ({support})" in text


def test_without_any_backend(world):
    result = world(
        ABSENT, TF_CONFIG=CLUSTER["TF_CONFIG"], KERAS_BACKEND="other_engine"
    )
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "no backend 'other_engine'" in text
    assert "Set KERAS_BACKEND to one of absent_engine" in text
    text = " ".join(world(ABSENT, KERAS_BACKEND="").output.split())
    assert "Commands take nothing" in text
    assert "only a working backend can tell" in text
    assert "pip install 'keras-dist[absent_engine]'" in text
    assert "TF_CONFIG" in text and "alpha" not in text


def test_one_that_takes_too_long(monkeypatch, world):
    monkeypatch.setattr(report, "backends", lambda: [HERE])
    found = report.gather(0.01)
    (own,) = found["backends"]
    assert own["problem"].startswith("can't be used, no answer within 0 s")


def test_the_file_of_keras_decides_without_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    assert packages.picked_by_keras()[0] is None
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    assert packages.picked_by_keras() == (
        "torch",
        "KERAS_BACKEND is not set, keras.json names it",
    )
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert packages.picked_by_keras() == ("jax", "KERAS_BACKEND=jax")


def test_hosts_are_the_same_everywhere_but_not_told():
    environ = {
        "KERAS_DIST_WORKERS": "a.corp:9000,b.corp:9000,a.corp:9001",
        "MASTER_ADDR": "b.corp",
        "RANK": "1",
    }
    assert cluster_variables(environ) == {
        "KERAS_DIST_WORKERS": "host1:9000,host2:9000,host1:9001",
        "MASTER_ADDR": "host2",
        "RANK": "1",
    }
    masks = Masks(environ)
    assert masks("can't meet a.corp:9000") == "can't meet host1:9000"
    assert masks("a.corporation stays") == "a.corporation stays"


@pytest.mark.parametrize(
    ("nodes", "shown", "others"),
    [
        ("node[1,3]", "host1,host2", {"node3": "host2", "node1": "host1"}),
        (
            "rack[1-2]n[08-09],login1",
            "host1,host2,host3,host4,host5",
            {"rack2n08": "host3", "login1": "host5", "rack1n10": "host6"},
        ),
        ("n[1-3]-ib,n2", "host1,host2,host3,host4", {"n2-ib": "host2"}),
        # Of many, hosts are numbered as they are met.
        ("node[1-2000000000]", "host1", {"node77": "host2"}),
        ("node[1,3", "host1", {"SLURM": "SLURM"}),
    ],
)
def test_hosts_of_slurm_are_not_told(nodes, shown, others):
    environ = {
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": "3",
        "SLURM_PROCID": "1",
    }
    assert cluster_variables(environ) == {
        "SLURM_NTASKS": "3",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NODELIST": shown,
    }
    masks = Masks(environ)
    for host, name in others.items():
        assert masks(f"no answer of {host}:9000") == f"no answer of {name}:9000"


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        # Hosts that are named as masks are not mixed up.
        ("host2:1,host1:1", "host1:1,host2:1"),
        # This machine is told.
        ("127.0.0.1:9000,localhost:9001", "127.0.0.1:9000,localhost:9001"),
    ],
)
def test_masks_of_hosts(environ, shown):
    found = cluster_variables({"KERAS_DIST_WORKERS": environ})
    assert found == {"KERAS_DIST_WORKERS": shown}


def test_a_config_that_can_not_be_read_hides_its_words():
    config = '{"cluster": alpha.corp:9000, "index": 1'
    shown = cluster_variables({"TF_CONFIG": config, "RANK": "1"})
    assert "alpha" not in shown["TF_CONFIG"]
    assert shown["RANK"] == "1"  # numbers are no hosts


def test_secrets_are_not_told():
    environ = {
        "JAX_API_KEY": "abc",
        "TORCH_AUTH": "abc",
        "XLA_FLAGS": f"--dump={os.path.expanduser('~')}/dump",
        "HOME": "abc",
        "TF_VAR_password": "abc",
        "KERAS_PASSWD": "abc",
        "KERAS_DB_PWD": "abc",
        "NVIDIA_PAT": "abc",
        "OMP_CREDS": "abc",
        "CUDA_PATH": "/usr/cuda",
        "TPU_INDEX": "https://me:p@ss@a.corp/simple, s3://bucket/a@b",
        "TF_GPU_ALLOCATOR": "cuda_malloc_async",
    }
    assert other_variables(environ) == {
        "KERAS_PASSWD": "(set, not shown)",
        "KERAS_DB_PWD": "(set, not shown)",
        "NVIDIA_PAT": "(set, not shown)",
        "OMP_CREDS": "(set, not shown)",
        "CUDA_PATH": "/usr/cuda",
        "TPU_INDEX": "https://(not shown)@a.corp/simple, s3://bucket/a@b",
        "JAX_API_KEY": "(set, not shown)",
        "TF_GPU_ALLOCATOR": "cuda_malloc_async",
        "TORCH_AUTH": "(set, not shown)",
        "XLA_FLAGS": "--dump=~/dump",
    }
