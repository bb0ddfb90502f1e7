"""Callbacks that write run on the chief only: known ones, and marked ones."""

import functools
import re
import tempfile

import keras
import pytest

import keras_dist
from workers import clusters
from workers import on_chief_jobs

SHARDS = keras.backend.backend() != "tensorflow"
VARIABLES = ["mirrored", *["sharded"] * SHARDS]
all_variables = pytest.mark.parametrize("variables", VARIABLES)


@functools.cache
def seen(variables):
    with tempfile.TemporaryDirectory() as folder:
        return clusters.run(
            on_chief_jobs.everything,
            (folder, variables),
            workers=2,
            devices=1,
            timeout=300,
        )


@all_variables
def test_one_worker_writes_and_all_train_alike(variables):
    chief, other = seen(variables)
    assert chief["epochs"] == other["epochs"] == [[0, 1], [0]]
    assert chief["weights"] == other["weights"]
    assert other["files"] == []
    written = {"log.csv", "last.keras", "wandb.txt"}
    written |= {"wandb-1.keras", "wandb-2.keras"}
    if variables == "mirrored":
        written |= {"users.txt", "users.keras"}
    assert set(chief["files"]) == written


@all_variables
def test_a_writer_of_another_package_is_told_all(variables):
    chief, _ = seen(variables)
    assert chief["texts"]["wandb.txt"].splitlines() == [
        *("batch 0", "batch 1", "epoch 0 loss val_loss"),
        *("batch 0", "batch 1", "epoch 1 loss val_loss"),
    ]


@all_variables
@pytest.mark.parametrize(
    ("action", "named"),
    [
        ("predict", r"`predict` of model '\w+'"),
        ("train_on_batch", r"`train_on_batch` of model '\w+'"),
        ("run", "`strategy.run`"),
        ("reduce", "An exchange of values, such as `strategy.reduce`,"),
    ],
)
def test_what_needs_all_workers_raises_at_once(variables, action, named):
    chief, other = seen(variables)
    assert re.match(
        f"ReplicaDivergenceError: {named} needs all workers, but only the "
        "chief runs the callback Asking, and would wait forever.",
        chief["errors"][action],
    )
    assert other["errors"] == {}


@all_variables
def test_variables_can_be_read_unless_each_worker_has_a_part(variables):
    chief, _ = seen(variables)
    found = chief["errors"]["weights"]
    if variables == "mirrored":
        assert found == 4
    else:
        assert "needs all workers" in found


@all_variables
def test_no_hook_is_left_behind(variables):
    assert [each["left"] for each in seen(variables)] == [[], []]


def test_a_mark_is_for_callbacks_that_only_write():
    with pytest.raises(TypeError, match="Received: <class .*CSVLogger"):
        keras_dist.on_chief(keras.callbacks.CSVLogger)
    stopping = keras.callbacks.EarlyStopping()
    with pytest.raises(ValueError, match="EarlyStopping changes the model"):
        keras_dist.on_chief(stopping)
    history = keras.callbacks.History()
    assert keras_dist.on_chief(history) is history
