"""Options that can't be are errors that say so: the command ends with 2."""

import os

import pytest

import keras_dist
from keras_dist.cli import environment
from keras_dist.environment import packages

pytestmark = pytest.mark.runs_on("torch")

BAD = [
    ("plan", "either --params or --model"),
    ("plan --params 1 --model a:b", "either --params or --model"),
    ("plan --params many", "'many'"),
    ("plan --params 0", "'0'"),
    ("plan --params 1e999", "'1e999'"),
    ("plan --params 1 --dtype int3", "'int3'"),
    ("plan --params 1 --optimizer muon", "are not known"),
    ("plan --params 1 --activations some", "20GiB"),
    ("plan --params 1 --backend mxnet", "no backend 'mxnet'"),
    ("plan --params 1 --devices 0", "--devices"),
    ("plan --params 1 --strategy abacus", "abacus"),
    ("plan --params 1 --strategy one-device --devices 2", "computes on one"),
    ("plan --params 1 --workers 2", "--strategy multi-worker"),
    ("plan --params 1 --parameter-devices 2", "--strategy central"),
    (
        "plan --params 1 --strategy central --optimizer-state sharded",
        "has one copy",
    ),
    (
        "plan --params 1 --strategy central --variables sharded",
        "--variables sharded",
    ),
    (
        "plan --params 1 --optimizer lamb --optimizer-state sharded",
        "takes whole variables",
    ),
    ("plan --model a:b --dtype float32", "has its own"),
    ("plan --model nothing", "module:function"),
    ("plan --model models_to_plan:with_other_data", "called on `x`, failed"),
    ("plan --params 1 --json no/such/folder/x.json", "folder"),
    ("plan --params 9 --batch-size 3", "it is for --target"),
    ("plan --params 9 --logical-devices 2", "it is for --target"),
    ("plan --target h100:8", "Say which one with --model"),
    ("bench --devices 0", "--devices"),
    ("bench --devices 64", "virtual_devices"),
    ("bench --devices 2 --strategy one-device", "on one device"),
    ("bench --variables sharded --strategy central", "one copy"),
    ("bench --strategy abacus", "abacus"),
    ("bench --batch-size 0", "--batch-size"),
    ("bench --rounds 0", "--rounds"),
    ("bench --backend nosuch", "'nosuch'"),
    ("bench --json no/such/folder/file.json", "folder"),
    ("bench --plot no/such/folder/file.png", "folder"),
    ("bench --plot picture.txt", "ends with .png"),
    ("demo --replicas 0", "--replicas"),
    ("demo --epochs 0", "--epochs"),
    ("demo --backend nosuch", "no backend 'nosuch' (from --backend)"),
    ("run -n 0 train.py", "'--workers'"),
    ("run train.py", "'--workers'"),
    ("run -n 1", "SCRIPT"),
    ("run -n 1 --nosuch 1 train.py", "--nosuch"),
    ("run -n 1 nosuch.py", "no 'nosuch.py' in"),
    ("run -n 2 --hosts a:1,b:1 train.py", "--host-index"),
    ("run -n 2 --host-index 1 train.py", "--hosts"),
    ("run -n 2 --backend nosuch train.py", "'nosuch'"),
    ("run -n 2 --max-restarts -1 train.py", "max-restarts"),
    ("run -n 2 --log-dir train.py train.py", "log-dir"),
    ("run -n 2 --log-dir train.py/x train.py", "log-dir"),
    (
        "run -n 3 --hosts a:1,b:1 --host-index 0 train.py",
        "multiple of the number of hosts",
    ),
    ("run -n 2 --hosts a:1,b:1 --host-index 2 train.py", "from 0 to 1"),
    ("run -n 2 --hosts a:1,b:1 --host-index -1 train.py", "from 0 to 1"),
    ("run -n 2 --hosts a,b:1 --host-index 0 train.py", "host 'a'"),
    ("run -n 2 --hosts a:1, --host-index 0 train.py", "host ''"),
    (
        "run -n 2 --hosts fd00::1:9,b:1 --host-index 0 train.py",
        "host 'fd00::1:9'",
    ),
    ("run -n 2 --hosts a:70000,b:1 --host-index 0 train.py", "'a:70000'"),
    ("run -n 2 --hosts a:65535,b:1 --host-index 0 train.py", "65535"),
    ("run -n 4 --hosts a:9000,a:9002 --host-index 0 train.py", "a:9002"),
]
# Of `plan --target`, for a model that could be compiled.
TARGETS = [
    ("h300:8", "there is no such target"),
    ("h100", "there is no such target"),
    ("h100:2x2x2", "devices, or hosts x devices"),
    ("v5e:8", "there is no such slice of TPU v5e"),
    ("v5e:4x2", "one of 1x1, 2x2, 2x4, 4x4"),
    ("v5e:2x2x2", "there is no such slice"),
    ("v5p:4x4", "three multiples of 4"),
    ("v5p:2x2x3", "there is no such slice"),
    ("v4:8x4x4", "the smallest first"),
    ("cpu:2 --backend mxnet", "no backend 'mxnet'"),
    ("cpu:200x200", "too many devices"),
    ("cpu:2 --devices 3", "Leave --devices out"),
    ("cpu:2 --params 7e9", "Leave --params out"),
    ("cpu:2 --parameter-devices 2", "a target has one"),
]
BAD += [
    (f"plan --model models_to_plan:wide --target {target}", message)
    for target, message in TARGETS
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_options(refused, monkeypatch, tmp_path, line, message):
    (tmp_path / "train.py").write_text("raise AssertionError('started')")
    monkeypatch.chdir(tmp_path)
    assert keras_dist.list_devices("cpu")  # no more can be made now
    assert message in refused(line)


@pytest.mark.parametrize(
    ("line", "variable", "hidden", "told"),
    [
        ("demo", "nosuch", (), "KERAS_BACKEND"),
        ("demo --backend jax", "torch", ("jax",), "keras-dist[jax]"),
        ("demo", "", ("jax", "tensorflow", "torch"), "keras-dist[jax]"),
        ("demo", "torch", ("sklearn",), "keras-dist[demo]"),
        ("bench --plot x.png", "torch", ("matplotlib",), "keras-dist[plot]"),
    ],
)
def test_what_is_not_installed_is_told_with_its_extra(
    refused, monkeypatch, line, variable, hidden, told
):
    find_spec = environment.find_spec
    for each in (environment, packages):
        monkeypatch.setattr(
            each,
            "find_spec",
            lambda name: None if name in hidden else find_spec(name),
        )
    monkeypatch.setenv("KERAS_BACKEND", variable)
    assert told in refused(line)


def test_without_a_choice_the_first_installed_is_taken(invoke, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setattr(
        packages, "find_spec", lambda name: name != "jax" or None
    )
    assert environment.select_backend(None) == "tensorflow"
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
