"""Checkpoints in parts: saved on some devices, and gone on with on others."""

import builtins
import json
import logging
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

import keras_dist
from keras_dist.errors import UnsupportedBackendError
from keras_dist.fit.workers import checkpoint_folder
from keras_dist.plugin.backend import get_backend
from parity.harness import assert_same
from parity.harness import scope
from parity.harness import set_initial_weights
from sharded import saving_script
from sharded.helpers import PLACES
from sharded.helpers import SHARDS_ON_DEVICES
from sharded.helpers import adam
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import network
from sharded.helpers import saves
from sharded.helpers import state_of

pytestmark = [saves, pytest.mark.usefixtures("all_are_large")]

WAYS = [
    ("plain", "plain"),
    ("mirrored_2", "plain"),
    ("plain", "mirrored_2"),
    ("central_2", "mirrored_2"),
    ("mirrored_2", "central_2"),
]
if SHARDS_ON_DEVICES:
    WAYS += [
        ("plain", "sharded_2"),
        ("sharded_2", "sharded_3"),
        ("sharded_3", "mirrored_2"),
        ("central_2", "sharded_2"),
        ("variables_2", "variables_2"),
        ("variables_2", "variables_3"),
        ("variables_3", "variables_2"),
        ("variables_3", "plain"),
        ("plain", "variables_3"),
        ("variables_2", "mirrored_2"),
        ("sharded_2", "variables_3"),
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


def trained(place="sharded_2" if SHARDS_ON_DEVICES else "mirrored_2"):
    model = compiled(*PLACES[place])
    fit(model)
    return model


@pytest.mark.parametrize(("saved", "restored"), WAYS)
def test_training_goes_on_elsewhere(saved, restored, path):
    model = trained(saved)
    keras_dist.save_sharded(model, path)
    again = compiled(*PLACES[restored])
    keras_dist.restore_sharded(again, path)
    assert_same(state_of(again), state_of(model), rtol=0, atol=0)
    fit(again)
    whole = compiled(None)
    fit(whole)
    fit(whole)
    assert_same(state_of(again), state_of(whole))


@pytest.mark.only_on("jax", reason="orbax writes for JAX")
def test_orbax_warns_of_nothing(path):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("absl").addHandler(handler)
    try:
        keras_dist.save_sharded(trained(), path)
    finally:
        logging.getLogger("absl").removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def with_all_kinds_of_state():
    """A model with seeds, statistics, and a scaled loss."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(9, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(3),
        ]
    )
    return set_initial_weights(model)


class SaveAt(keras.callbacks.Callback):
    """Saves at the end of an epoch, or of one of its batches."""

    def __init__(self, path, epoch, batch=None):
        super().__init__()
        self.path, self.at, self.batch = path, epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (self.at, self.batch):
            keras_dist.save_sharded(self.model, self.path)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.at and self.batch is None:
            keras_dist.save_sharded(self.model, self.path)


@pytest.mark.parametrize(
    "place", ["plain", "variables_3" if SHARDS_ON_DEVICES else "mirrored_2"]
)
def test_saved_inside_of_fit(place, path):
    def model():
        with scope(*PLACES[place]):
            made = with_all_kinds_of_state()
            scaled = keras.optimizers.LossScaleOptimizer(
                adam(), initial_scale=2.0**8, dynamic_growth_steps=3
            )
            made.compile(scaled, "mse")
        return made

    whole = model()
    fit(whole, epochs=4, callbacks=[SaveAt(path, epoch=1)])
    again = model()
    keras_dist.restore_sharded(again, path)
    fit(again, initial_epoch=2, epochs=4)
    assert_same(state_of(again), state_of(whole))


def test_saved_between_batches(path):
    place = PLACES["variables_2" if SHARDS_ON_DEVICES else "mirrored_2"]
    model = compiled(*place)
    fit(model, epochs=1, callbacks=[SaveAt(path, epoch=0, batch=1)])
    again, expected = compiled(*place), compiled(*place)
    keras_dist.restore_sharded(again, path)
    fit(expected, epochs=1, steps_per_epoch=2)
    # `fit` ends with the averages as weights.
    found, states = state_of(again), state_of(expected)
    names = [name for name in states if name.startswith("optimizer")]
    assert len(names) > 10
    assert_same(
        {name: found[name] for name in names},
        {name: states[name] for name in names},
    )


def test_an_older_one_is_replaced(path):
    model = trained()
    keras_dist.save_sharded(model, path)
    fit(model)
    keras_dist.save_sharded(model, path)
    assert len(list(path.iterdir())) == 2  # the parts, and what they are
    again = compiled(None)
    keras_dist.restore_sharded(again, path)
    assert_same(state_of(again), state_of(model), rtol=0, atol=0)


def test_a_failed_save_leaves_the_older_one(path, monkeypatch):
    model = trained()
    keras_dist.save_sharded(model, path)
    before = state_of(model)
    fit(model)
    backend = type(get_backend())
    original = backend.save_shards

    def failing(*args, **kwargs):
        original(*args, **kwargs)
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(backend, "save_shards", failing)
        with pytest.raises(OSError, match="no space left"):
            keras_dist.save_sharded(model, path)
    again = compiled(None)
    keras_dist.restore_sharded(again, path)
    assert_same(state_of(again), before, rtol=0, atol=0)
    # What was left behind is removed by the next one.
    keras_dist.save_sharded(model, path)
    assert len(list(path.iterdir())) == 2


def test_a_new_model_in_the_same_process(path):
    """Keras numbers the names of its layers and optimizers."""
    model = trained("plain")
    keras_dist.save_sharded(model, path)
    again = compiled(None)
    assert again.layers[0].name != model.layers[0].name
    keras_dist.restore_sharded(again, path)
    assert_same(state_of(again), state_of(model), rtol=0, atol=0)


def test_weights_alone_for_a_model_that_is_not_compiled(path):
    model = trained()
    keras_dist.save_sharded(model, path)
    plain = network()
    keras_dist.restore_sharded(plain, path)
    for found, expected in zip(
        plain.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def refused(model, path, error, *texts):
    """Nothing of the model changes."""
    before = state_of(model)
    with pytest.raises(error) as raised:
        keras_dist.restore_sharded(model, path)
    for text in texts:
        assert text in str(raised.value)
    assert_same(state_of(model), before, rtol=0, atol=0)


def test_no_checkpoint(path):
    refused(trained(), path, FileNotFoundError, str(path), "save_sharded")


def test_an_unfinished_checkpoint(path):
    model = trained()
    keras_dist.save_sharded(model, path)
    (path / "checkpoint.json").unlink()
    refused(model, path, FileNotFoundError, str(path))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"parts": "../mine"}', '{"parts": ["a"]}']
)
def test_an_index_that_is_damaged_or_of_the_user(path, text):
    model = trained()
    keras_dist.save_sharded(model, path)
    index = path / "checkpoint.json"
    index.write_text(text)
    refused(model, path, FileNotFoundError, str(path))
    with pytest.raises(ValueError, match=r"'checkpoint\.json' that is not one"):
        keras_dist.save_sharded(model, path)
    assert index.read_text() == text
    index.unlink()
    keras_dist.save_sharded(model, path)
    keras_dist.restore_sharded(model, path)


def damage(path):
    for file in path.glob("parts-*/**/*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:16])


def test_damaged_parts(path, tmp_path):
    """A script goes on from an older checkpoint."""
    model = trained()
    older = tmp_path / "older"
    keras_dist.save_sharded(model, older)
    keras_dist.save_sharded(model, path)
    damage(path)
    again = compiled(None)
    try:
        keras_dist.restore_sharded(again, path)
    except Exception as error:
        failure = error
        keras_dist.restore_sharded(again, older)
    assert isinstance(failure, (keras_dist.CheckpointError, OSError))
    assert f"path='{path}'" in str(failure)
    assert type(failure.__cause__).__name__ in str(failure)
    assert_same(state_of(again), state_of(model), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_it_reads(path, kind, monkeypatch):
    model = trained()
    keras_dist.save_sharded(model, path)

    def interrupted(*args, **kwargs):
        raise kind("by the user")

    if keras.backend.backend() == "torch":
        from torch.distributed.checkpoint import FileSystemReader as reader

        monkeypatch.setattr(reader, "read_data", interrupted)
    else:
        from orbax.checkpoint import PyTreeCheckpointHandler as reader

        monkeypatch.setattr(reader, "restore", interrupted)
    with pytest.raises(kind, match="by the user"):
        keras_dist.restore_sharded(model, path)


def test_a_disk_that_can_not_be_written(path, monkeypatch):
    model = trained()

    def full(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("os.makedirs", full)
        with pytest.raises(keras_dist.CheckpointError, match="no space left"):
            keras_dist.save_sharded(model, path)


MINE = [
    *("parts-catalogue", "parts-2024", "images", "parts-0123456789abcdef"),
    *(".unfinished-parts-notes", ".unfinished-parts-0123456789ABCDEF"),
]


def test_what_else_is_in_the_folder_stays(path, tmp_path):
    for name in MINE:
        (path / name).mkdir(parents=True)
        (path / name / "mine.txt").write_text("precious")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("precious")
    links = [path / "parts-linked", path / f".unfinished-parts-{'0' * 16}"]
    for link in links:
        link.symlink_to(elsewhere)
    files = [path / "checkpoint.json.bak", path / "parts-list.txt"]
    for file in files:
        file.write_text("precious")
    left = path / f".unfinished-parts-{'a' * 16}"
    left.mkdir()
    model = trained()
    for _ in range(2):
        keras_dist.save_sharded(model, path)
    for name in MINE:
        assert (path / name / "mine.txt").read_text() == "precious"
    for link in links:
        assert (link / "mine.txt").read_text() == "precious"
    for file in files:
        assert file.read_text() == "precious"
    # Besides, there is one checkpoint.
    assert not left.exists()
    assert len(list(path.iterdir())) == len([*MINE, *links, *files]) + 2


def test_parts_that_the_user_has_moved_stay(path, tmp_path):
    """They are on a larger disk, and a link is in their place."""
    model = trained()
    keras_dist.save_sharded(model, path)
    (parts,) = path.glob("parts-*")
    moved = parts.rename(tmp_path / "large disk")
    parts.symlink_to(moved)
    keras_dist.restore_sharded(compiled(None), path)
    files = sorted(moved.rglob("*"))
    keras_dist.save_sharded(model, path)
    assert sorted(moved.rglob("*")) == files
    keras_dist.restore_sharded(compiled(None), path)


def test_an_index_that_is_a_link(path, tmp_path):
    model = trained()
    keras_dist.save_sharded(model, path)
    index = path / "checkpoint.json"
    kept = index.rename(tmp_path / "kept.json")
    index.symlink_to(kept)
    keras_dist.save_sharded(model, path)
    assert index.is_symlink()
    keras_dist.restore_sharded(model, path)
    assert len(list(path.iterdir())) == 2


class Replaced:
    """Replaces the checkpoint while it is read, so many times."""

    def __init__(self, monkeypatch, model, path, number, fails):
        self.left, self.reads = number, 0
        backend = type(get_backend())
        original = backend.restore_shards

        def restore_shards(*args):
            self.reads += 1
            if self.left:
                self.left -= 1
                fit(model, epochs=1)
                keras_dist.save_sharded(model, path)
                if fails:
                    raise ValueError("a part is gone")
                return
            original(*args)

        monkeypatch.setattr(backend, "restore_shards", restore_shards)


@pytest.mark.parametrize("fails", [True, False])
def test_a_checkpoint_that_is_replaced_is_read_again(path, fails, monkeypatch):
    model = trained()
    keras_dist.save_sharded(model, path)
    replaced = Replaced(monkeypatch, model, path, 3, fails)
    again = compiled(None)
    keras_dist.restore_sharded(again, path)
    assert replaced.reads == 4
    assert_same(state_of(again), state_of(model), rtol=0, atol=0)


def test_one_that_is_always_replaced(path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "_MOST_READS", 3)
    model = trained()
    keras_dist.save_sharded(model, path)
    Replaced(monkeypatch, model, path, 100, False)
    with pytest.raises(keras_dist.CheckpointError, match="replaced 3 times"):
        keras_dist.restore_sharded(compiled(None), path)


# orbax leaves reads that are under way alone when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_read_while_another_process_saves_again_and_again(path):
    command = [sys.executable, saving_script.__file__, str(path), "foreground"]
    folder = pathlib.Path(__file__).parents[1]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        process.stdout.readline()
        model = saving_script.make_model()
        numbers = []
        for _ in range(20):
            keras_dist.restore_sharded(model, path)
            (number,) = {float(v) for w in model.get_weights() for v in w.flat}
            numbers.append(number)
        process.kill()
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 1


@pytest.mark.parametrize("function", ["save_sharded", "restore_sharded"])
def test_what_is_no_model(path, function):
    with pytest.raises(TypeError, match=r"Expected: a `keras\.Model`"):
        getattr(keras_dist, function)(path, path)


def test_a_file_in_its_place(path):
    path.write_text("mine")
    with pytest.raises(ValueError, match="Expected: a folder"):
        keras_dist.save_sharded(trained(), path)
    assert path.read_text() == "mine"


def test_of_another_backend(path):
    model = trained()
    keras_dist.save_sharded(model, path)
    index = path / "checkpoint.json"
    index.write_text(
        json.dumps({**json.loads(index.read_text()), "backend": "other"})
    )
    refused(model, path, ValueError, "'other'", keras.backend.backend())


def other(width=5, names=("dense", "dense_1"), dtype="float32", more=False):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(width, name=names[0], dtype=dtype),
            layers.Dense(3, name=names[1], dtype=dtype),
            *([layers.Dense(3, name="extra")] if more else []),
        ]
    )
    model.compile(adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"width": 6}, ["(4, 5)", "(4, 6)", "kernel"]),
        ({"dtype": "float16"}, ["float16", "float32"]),
        ({"more": True}, ["extra/kernel", "not in the checkpoint"]),
        ({"names": ("mine", "other")}, ["mine/kernel"]),
    ],
)
def test_other_variables(path, settings, texts):
    keras_dist.save_sharded(trained(), path)
    refused(other(**settings), path, ValueError, *texts)


def test_another_optimizer(path):
    keras_dist.save_sharded(trained(), path)
    model = compiled(None, optimizer=keras.optimizers.SGD)
    model.optimizer.build(model.trainable_variables)
    refused(model, path, ValueError, "optimizer")


def test_a_model_that_is_not_built(path):
    model = keras.Sequential([layers.Dense(3)])
    for call in keras_dist.save_sharded, keras_dist.restore_sharded:
        with pytest.raises(ValueError, match="not built"):
            call(model, path)
    assert not path.exists()


def test_addresses_of_other_hosts(path):
    with pytest.raises(ValueError, match="gs://"):
        keras_dist.save_sharded(trained(), "gs://bucket/checkpoint")


@pytest.mark.only_on("jax", reason="PyTorch needs no other package.")
def test_a_missing_package(path, monkeypatch):
    original = builtins.__import__

    def failing(name, *args, **kwargs):
        if name.startswith("orbax"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return original(name, *args, **kwargs)

    model = trained()
    monkeypatch.setattr(builtins, "__import__", failing)
    for call in keras_dist.save_sharded, keras_dist.restore_sharded:
        with pytest.raises(
            UnsupportedBackendError, match="sharded-checkpoints"
        ):
            call(model, path)
    assert not pathlib.Path(path).exists()
