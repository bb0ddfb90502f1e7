"""`keras-dist demo` shows on replicas the weights of one device, or fails."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import keras
import pytest

from keras_dist.cli.jobs import demo
from keras_dist.core.context import has_strategy

pytestmark = pytest.mark.runs_on("torch")


@pytest.mark.smoke
def test_it_passes_and_shows_what_it_did():
    inherited = dict(os.environ)
    inherited.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
    backend = keras.backend.backend()
    finished = subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "demo", "--backend", backend]
        + ["--replicas", "3", "--epochs", "2", "--verbose"],
        env=inherited | {"COLUMNS": "80", "KERAS_BACKEND": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[0] == "PASS the same weights as one device"
    assert "FAIL" not in finished.stdout
    assert max(map(len, lines)) <= 80
    for shown in (
        "Compared with one device +same: ",
        rf"Backend +{backend} {re.escape(version(backend))}",
        rf"Keras +{re.escape(keras.__version__)}",
        r"Devices +cpu:0 cpu:1 cpu:2\b",
        r"Replicas +3\b",
        "Global batch +100 rows",
        "Per-replica batch +at most 34 rows",
        "Last global batch +7 rows",
        r"training +weight +5 .* same\b",
        r"digits/hidden/kernel .* mirrored +cpu:0-2\b",
        # 2,442 parameters of 4 bytes: 2 (3 - 1) / 3 of them from each of 3.
        r"gradients, all-reduce +devices +cpu:0-2 +13.0 kB +39.1 kB",
    ):
        assert re.search(shown, finished.stdout), shown
    (accuracy,) = re.findall(r"Test accuracy +([\d.]+)", finished.stdout)
    assert float(accuracy) > 0.5
    # Standard error has what it does, and no logs.
    first, *lines = finished.stderr.splitlines()
    assert first == (
        "keras-dist demo: trains a small net on 3 virtual replicas, and "
        "compares with one device. With the default of 5 epochs, it takes up "
        "to a minute."
    )
    text = "\n".join(lines)
    losses = re.findall(r"on replicas, epoch \d: .*loss ([\d.]+)", text)
    assert len(losses) == len([line for line in lines if line]) == 2
    assert float(losses[1]) < float(losses[0])


def test_tables_and_epochs_are_for_verbose(invoke, monkeypatch):
    monkeypatch.setattr(demo, "set_virtual_devices", lambda count: None)
    quiet = invoke("demo --replicas 2 --epochs 1")
    assert quiet.exit_code == 0, quiet.output
    assert quiet.stdout.startswith("PASS")
    assert re.search(r"Per-replica batch +50 rows", quiet.stdout)
    assert "hidden" not in quiet.stdout
    assert len(quiet.stdout.splitlines()) < 15
    assert "epoch 1" not in quiet.output


@pytest.mark.parametrize(
    ("name", "value", "is_plain"),
    [("momentum", 0.5, False), ("learning_rate", float("nan"), True)],
)
def test_other_numbers_and_no_numbers_are_a_fail(
    invoke, monkeypatch, name, value, is_plain
):
    build = demo.digits.model

    def spoiled():
        model = build()
        if is_plain or has_strategy():
            setattr(model.optimizer, name, value)
        return model

    monkeypatch.setattr(demo.digits, "model", spoiled)
    monkeypatch.setattr(demo, "set_virtual_devices", lambda count: None)
    result = invoke("demo --replicas 2 --epochs 1")
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL different numbers")
