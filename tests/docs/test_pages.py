"""The programs on the pages of the site do what the pages say."""

import pathlib
import re

import keras
import numpy as np

import keras_dist

TOP = pathlib.Path(__file__).parents[2]


def programs(page):
    """The blocks of Python code of a page, in order."""
    text = (TOP / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def program_with(page, name):
    (found,) = (each for each in programs(page) if name in each)
    return found


def names_of_readers():
    """What the programs take for granted."""
    rng = np.random.default_rng(0)
    return {
        "keras": keras,
        "keras_dist": keras_dist,
        "np": np,
        "strategy": keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
        "x": rng.normal(size=(210, 64)).astype("float32"),
        "y": rng.integers(0, 10, 210),
    }


def test_the_replica_function_does_what_it_says(capsys):
    names = names_of_readers()
    exec(program_with("docs/pages/guide/examples.md", "replica_fn"), names)
    printed = re.findall(r"\d+\.\d*", capsys.readouterr().out)
    assert [round(float(number), 4) for number in printed[:2]] == [16.0, 0.0]
    assert float(names["seen"].result()) == np.float32(16 / 22)


def test_the_training_loop_does_what_it_says():
    names = names_of_readers()
    exec(program_with("docs/pages/guide/examples.md", "train_step"), names)
    assert int(names["optimizer"].iterations) == 3
    assert 0 < float(names["loss"]) < 20
    assert int(names["accuracy"].count) == 210


def test_the_first_program_does_what_it_says(monkeypatch, tmp_path):
    names = names_of_readers()
    monkeypatch.chdir(tmp_path)
    (program,) = programs("README.md")
    # The tests have as many already, and a second one is told when too late.
    assert "set_virtual_devices(4)" in program
    exec(program, names)
    assert names["strategy"].num_replicas_in_sync == 4
    assert (tmp_path / "m.keras").exists()


def test_the_plugins_do_what_they_say(tmp_path):
    names = names_of_readers()
    hosts = tmp_path / "hosts"
    hosts.write_text("a:9000\nb:9000\n")
    for program in programs("docs/pages/plugins.md"):
        exec(program, names)
    resolver = names["HostFileResolver"](hosts, 1)
    cluster = keras_dist.cluster_resolver.cluster_of(resolver)
    assert cluster.addresses == ("a:9000", "b:9000")
    assert cluster.index == 1
