"""A checkpoint in parts is saved on some devices, and goes on on others."""

import builtins
import json
import logging
import pathlib
import shutil
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
from sharded.helpers import assert_equal
from sharded.helpers import assert_saved
from sharded.helpers import compiled
from sharded.helpers import fit
from sharded.helpers import network
from sharded.helpers import saves
from sharded.helpers import state_of
from sharded.helpers import trained

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


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A model that was trained, and where it is saved."""
    model, folder = trained(), tmp_path_factory.mktemp("original")
    keras_dist.save_sharded(model, folder / "checkpoint")
    return model, folder / "checkpoint"


@pytest.fixture
def model(original):
    """A model that was trained; no test changes it."""
    return original[0]


@pytest.fixture
def saved(original, path):
    """Where the checkpoint of `model` is."""
    shutil.copytree(original[1], path)
    return path


@pytest.mark.parametrize(("here", "there"), WAYS)
def test_training_goes_on_elsewhere(here, there, path):
    model = trained(here)
    keras_dist.save_sharded(model, path)
    again = compiled(*PLACES[there])
    keras_dist.restore_sharded(again, path)
    assert_equal(state_of(again), state_of(model))
    fit(again)
    whole = compiled(None)
    fit(whole)
    fit(whole)
    assert_same(state_of(again), state_of(whole))


@pytest.mark.only_on("jax", reason="orbax writes for JAX")
def test_orbax_warns_of_nothing(model, path):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("absl").addHandler(handler)
    try:
        keras_dist.save_sharded(model, path)
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


def test_a_failed_save_leaves_the_older_one(path, monkeypatch):
    """One that does not fail replaces it."""
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
    assert_saved(path, before)
    # What was left behind is removed by the next one.
    keras_dist.save_sharded(model, path)
    assert len(list(path.iterdir())) == 2  # the parts, and what they are
    assert_saved(path, state_of(model))


def test_weights_alone_for_a_model_that_is_not_compiled(model, saved):
    plain = network()
    keras_dist.restore_sharded(plain, saved)
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
    assert_equal(state_of(model), before)


def test_no_checkpoint_or_an_unfinished_one(model, path, original):
    refused(model, path, FileNotFoundError, str(path), "save_sharded")
    shutil.copytree(original[1], path)
    (path / "checkpoint.json").unlink()
    refused(model, path, FileNotFoundError, str(path))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"parts": "../mine"}', '{"parts": ["a"]}']
)
def test_an_index_that_is_damaged_or_of_the_user(model, saved, text):
    index = saved / "checkpoint.json"
    index.write_text(text)
    refused(model, saved, FileNotFoundError, str(saved))
    with pytest.raises(ValueError, match=r"'checkpoint\.json' that is not one"):
        keras_dist.save_sharded(model, saved)
    assert index.read_text() == text
    index.unlink()
    keras_dist.save_sharded(model, saved)
    keras_dist.restore_sharded(model, saved)


def test_damaged_parts(model, saved, original):
    """A script goes on from an older checkpoint."""
    for file in saved.glob("parts-*/**/*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:16])
    again = compiled(None)
    try:
        keras_dist.restore_sharded(again, saved)
    except Exception as error:
        failure = error
        keras_dist.restore_sharded(again, original[1])
    assert isinstance(failure, (keras_dist.CheckpointError, OSError))
    assert f"path='{saved}'" in str(failure)
    assert type(failure.__cause__).__name__ in str(failure)
    assert_equal(state_of(again), state_of(model))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_it_reads(model, saved, kind, monkeypatch):
    def interrupted(*args, **kwargs):
        raise kind("by the user")

    if keras.backend.backend() == "torch":
        from torch.distributed.checkpoint import FileSystemReader as reader

        monkeypatch.setattr(reader, "read_data", interrupted)
    else:
        from orbax.checkpoint import PyTreeCheckpointHandler as reader

        monkeypatch.setattr(reader, "restore", interrupted)
    with pytest.raises(kind, match="by the user"):
        keras_dist.restore_sharded(model, saved)


def test_a_disk_that_can_not_be_written(model, path, monkeypatch):
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


def test_what_else_is_in_the_folder_stays(model, path, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    folders = [*(path / name for name in MINE), elsewhere]
    for folder in folders:
        folder.mkdir(parents=True)
    links = [path / "parts-linked", path / f".unfinished-parts-{'0' * 16}"]
    for link in links:
        link.symlink_to(elsewhere)
    files = [
        *(path / "checkpoint.json.bak", path / "parts-list.txt"),
        *(folder / "mine.txt" for folder in folders),
    ]
    for file in files:
        file.write_text("precious")
    left = path / f".unfinished-parts-{'a' * 16}"
    left.mkdir()
    for _ in range(2):
        keras_dist.save_sharded(model, path)
    for file in [*files, *(link / "mine.txt" for link in links)]:
        assert file.read_text() == "precious"
    # Besides, there is one checkpoint.
    assert not left.exists()
    assert len(list(path.iterdir())) == len([*MINE, *links]) + 2 + 2


def test_parts_and_an_index_that_are_links(model, saved, tmp_path):
    """The user has moved them to a larger disk."""
    (parts,) = saved.glob("parts-*")
    for link in (parts, saved / "checkpoint.json"):
        link.symlink_to(link.rename(tmp_path / link.name))
    assert_saved(saved, state_of(model))
    moved = tmp_path / parts.name
    files = sorted(moved.rglob("*"))
    keras_dist.save_sharded(model, saved)
    assert sorted(moved.rglob("*")) == files
    assert (saved / "checkpoint.json").is_symlink()
    assert_saved(saved, state_of(model))


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
    assert_equal(state_of(again), state_of(model))


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


def test_where_none_can_be(model, path):
    path.write_text("mine")
    for place, text in ((path, "a folder"), ("gs://bucket/here", "gs://")):
        with pytest.raises(ValueError, match=text):
            keras_dist.save_sharded(model, place)
    assert path.read_text() == "mine"


def test_of_another_backend(model, saved):
    index = saved / "checkpoint.json"
    index.write_text(
        json.dumps({**json.loads(index.read_text()), "backend": "other"})
    )
    refused(model, saved, ValueError, "'other'", keras.backend.backend())


def other(
    width=5,
    names=("dense", "dense_1"),
    dtype="float32",
    more=False,
    optimizer=adam,
):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(width, name=names[0], dtype=dtype),
            layers.Dense(3, name=names[1], dtype=dtype),
            *([layers.Dense(3, name="extra")] if more else []),
        ]
    )
    model.compile(optimizer(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"width": 6}, ["(4, 5)", "(4, 6)", "kernel"]),
        ({"dtype": "float16"}, ["float16", "float32"]),
        ({"more": True}, ["extra/kernel", "not in the checkpoint"]),
        ({"names": ("mine", "other")}, ["mine/kernel"]),
        ({"optimizer": keras.optimizers.SGD}, ["optimizer"]),
    ],
)
def test_other_variables(saved, settings, texts):
    refused(other(**settings), saved, ValueError, *texts)


def test_a_model_that_is_not_built(path):
    model = keras.Sequential([layers.Dense(3)])
    for call in keras_dist.save_sharded, keras_dist.restore_sharded:
        with pytest.raises(ValueError, match="not built"):
            call(model, path)
    assert not path.exists()


@pytest.mark.only_on("jax", reason="PyTorch needs no other package.")
def test_a_missing_package(model, path, monkeypatch):
    original = builtins.__import__

    def failing(name, *args, **kwargs):
        if name.startswith("orbax"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", failing)
    for call in keras_dist.save_sharded, keras_dist.restore_sharded:
        with pytest.raises(
            UnsupportedBackendError, match="sharded-checkpoints"
        ):
            call(model, path)
    assert not pathlib.Path(path).exists()
