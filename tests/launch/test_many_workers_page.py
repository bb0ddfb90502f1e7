"""The files and commands on the page about many workers do what it says."""

import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import typer.testing

import keras_dist
from keras_dist.cli.main import app
from ports import free_block

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT.joinpath("docs", "pages", "guide", "many_workers.md").read_text()
BIN = pathlib.Path(sys.executable).parent


def blocks(language):
    """The page's blocks of code in a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands():
    """The shell commands of the page, without prompts."""
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [re.sub(r"^[\w-]+\$ ", "", line) for line in lines]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(blocks("python")[0])
    return path


def run(command, script):
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2 workers, this is worker 0" in done.stderr
    return done.stdout


def check_output(text, prefix=""):
    # Under torchrun, workers write to one pipe and may share a line.
    accuracies = re.findall(r"accuracy (0\.\d{3})(?!\d)", text)
    assert len(accuracies) == 2, text[-3000:]
    assert len(set(accuracies)) == 1
    # The chief's alone: a line an epoch.
    assert len(re.findall(r"accuracy: ", text)) == 3, text[-3000:]
    assert text.count("keras_dist on ") == 1, text[-3000:]


@pytest.mark.nightly
def test_one_machine(script):
    command = shlex.split(commands()[0])
    check_output(run(command, script))
    assert (script.parent / "digits.keras").exists()


@pytest.mark.runs_on("torch")
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torchrun comes with PyTorch, which is not installed.",
)
def test_torchrun(script):
    (command,) = (c for c in commands() if c.startswith("torchrun"))
    # Workers take the ports after the one of torchrun.
    port = str(free_block(3))
    where = ["--master-addr", "127.0.0.1", "--master-port", port]
    check_output(run(["torchrun", *where, *shlex.split(command)[1:]], script))


@pytest.mark.runs_on("tensorflow")
def test_a_function():
    names = {"keras_dist": keras_dist}
    exec(blocks("python")[1], names)


def test_the_options_exist():
    text = typer.testing.CliRunner().invoke(app, ["run", "--help"]).output
    asked = {
        option
        for command in commands()
        if command.startswith("keras-dist run")
        for option in re.findall(r"--[a-z-]+", command)
    }
    assert asked == {
        option for option in asked if option in re.sub(r"\s+", " ", text)
    }


def test_what_kubernetes_sets_is_a_cluster():
    (value,) = re.findall(r"value: (digits-workers.*)", PAGE)
    from keras_dist.cluster_resolver import cluster_of
    from keras_dist.cluster_resolver import detect

    resolver, _ = detect(
        {"KERAS_DIST_WORKERS": value, "KERAS_DIST_WORKER_INDEX": "1"}
    )
    cluster = cluster_of(resolver)
    assert (cluster.index, cluster.num_workers) == (1, 2)
    assert cluster.leader == "digits-workers-0-0.digits:9000"


def test_tf_config_of_the_page():
    (command,) = (c for c in commands() if c.startswith("TF_CONFIG="))
    assignment, *_ = shlex.split(command)
    name, _, value = assignment.partition("=")
    from keras_dist.cluster_resolver import cluster_of
    from keras_dist.cluster_resolver import detect

    cluster = cluster_of(detect({name: value})[0])
    assert cluster.addresses == ("a:9000", "b:9000")
