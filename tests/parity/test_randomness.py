"""Draws of `keras.random` in `fit` and its relatives are one device's."""

import threading
import warnings

import keras
import numpy as np
import pytest
from keras import layers

from parity import draws
from parity import models
from parity.cases import new
from parity.cases import sgd
from parity.cases import with_
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import Case
from parity.harness import assert_same
from parity.harness import central
from parity.harness import flat
from parity.harness import plain
from parity.harness import scope
from parity.harness import sharded
from parity.harness import state_of
from parity.harness import strategy
from parity.harness import train

FEATURES = 64
IS_JAX = BACKEND == "jax"
# Plain Keras refuses these: an unknown number of rows can't be shuffled, draws
# without a seed can't be traced, and there is no float64.
NOT_ON_JAX = (
    "columns_in_another_order",
    "double",
    "dropped_columns",
    "without_a_seed",
)
FIT = {"batch_size": 12, "shuffle": False, "verbose": 0}
no_plain_counterpart = pytest.mark.skipif(
    PLAIN_ONLY, reason="It has no plain counterpart."
)

slow = with_(new(sgd, learning_rate=0.01))


def case(name, build, data, **options):
    """43 rows in batches of 12: shares of 2 to 6 rows, a last one of 1."""
    given = {"rows": 43, "batch_size": 12, "compile": slow, "rtol": 1e-6}
    return Case(name, build, data, **{**given, **options})


def _table(rows):
    return models.table(rows, 7, 3)


class Denoising(keras.Model):
    """Draws in a step of its own: noise, and times for each row."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(9, activation="tanh")
        self.dropped = layers.Dropout(0.2)
        self.head = layers.Dense(7)
        self.seeds = keras.random.SeedGenerator(13)

    def call(self, x, training=False):
        return self.head(self.dropped(self.hidden(x), training=training))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        shape = keras.ops.shape(x)
        noise = keras.random.normal(shape, seed=self.seeds)
        times = keras.random.uniform((shape[0], 1), seed=self.seeds)
        noisy = x * (1 - times) + noise * times
        return super().compute_loss(
            x=x, y=noise, y_pred=self(noisy, training=True), training=training
        )


FIRST = draws.augmented(*draws.FIRST_AUGMENTATIONS)
OTHERS = draws.augmented(*draws.OTHER_AUGMENTATIONS)
TRANSFORMER = case("transformer", draws.transformer, draws.sentences, full=True)
CHECKPOINTED = case(
    "checkpointed_blocks",
    draws.checkpointed_blocks,
    _table,
    backends=("torch",),
)
CASES = [
    case("mlp", draws.mlp, _table, full=True),
    case("mlp_with_seeds", lambda: draws.mlp(3), _table),
    TRANSFORMER,
    case("recurrent", draws.recurrent, draws.sentences),
    case("noisy", draws.noisy, draws.sentences, rtol=2e-6),
    case("augmented", FIRST, draws.pictures, rows=37),
    case("augmented_again", OTHERS, draws.pictures, rows=37),
    case("variational", draws.variational, _table, full=True),
    case("shuffled", draws.mlp, _table, fit={"shuffle": True}),
    case(
        "eager",
        draws.mlp,
        _table,
        compile=lambda: {**slow(), "run_eagerly": True},
    ),
    case("keeping", draws.keeping, _table),
    # Three of four replicas have no row of the last batch.
    case("one_row_left", draws.mlp, _table, rows=37),
    case("shared_over_time", draws.shared_over_time, draws.sentences),
    case("noisy_kernel", draws.noisy_kernel, _table),
    # The number of rows is known in graphs of TensorFlow.
    case("only_full_batches", draws.noisy_kernel, _table, rows=48),
    case("few_rows", draws.noisy, draws.sentences, rows=6, batch_size=2),
    case(
        "few_rows_of_kernels", draws.noisy_kernel, _table, rows=5, batch_size=2
    ),
    case("denoising", Denoising, lambda rows: models.table(rows, 7, 7)),
]
if BACKEND == "torch":  # plain Keras on TensorFlow fails, JAX has other means
    CASES += [case("checkpointed", draws.checkpointed, _table), CHECKPOINTED]
CASES += [
    case(f"draw_{name}", lambda name=name: draws.drawing(name), _table)
    for name in draws.DRAWS
    if not (IS_JAX and name in NOT_ON_JAX)
]


def _parameters():
    for index, each in enumerate(CASES):
        count = index % 3 + 2
        yield pytest.param(each, count, strategy, id=f"{each.name}-{count}")
    yield pytest.param(TRANSFORMER, 3, central, id="central")
    if IS_JAX:  # others shard nothing in one process
        yield pytest.param(TRANSFORMER, 3, sharded, id="sharded")


@pytest.fixture(autouse=True)
def _fresh():
    """Draws without a seed begin anew."""
    keras.utils.clear_session()


@pytest.mark.parametrize(("each", "num_replicas", "make"), [*_parameters()])
def test_models_that_draw(each, num_replicas, make):
    expected = plain(each)
    keras.utils.clear_session()
    assert_same(train(each, num_replicas, make), expected, each.rtol)


def _compiled(count, build):
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    with scope(count):
        model = build()
        model.compile("sgd", "mse", jit_compile=JIT)
    return model


def test_draws_in_train_on_batch_and_evaluate():
    """`evaluate` and `predict` draw too if a layer always does."""
    data = _table(15)

    def build():
        drawing = models.AlwaysDropout(), layers.Dropout(0.3)
        return draws.stack((7,), layers.Dense(8), *drawing)

    def outcome(num_replicas):
        model = _compiled(num_replicas, build)
        options = {"batch_size": 6, "verbose": 0}
        found = {
            "batch": model.train_on_batch(**data),
            "eval": model.evaluate(**data, **options),
            "predict": model.predict(data["x"], **options),
        }
        model.fit(**data, **options, shuffle=False)
        return flat("", found) | state_of(model)

    assert_same(outcome(3), outcome(None), 1e-6)


def test_a_rate_that_changes():
    """A layer that begins to draw leaves the draws of others as they were."""

    def build():
        return draws.stack(
            (7,),
            layers.Dense(8),
            layers.Dropout(0.3, name="late"),
            layers.Dense(7),
            layers.Dropout(0.3, noise_shape=(1, 7)),
        )

    def outcome(num_replicas):
        model = _compiled(num_replicas, build)
        for rate in (0.0, 0.3):
            model.get_layer("late").rate = rate
            model.make_train_function(force=True)
            model.fit(**_table(24), **FIT)
        return state_of(model)

    assert_same(outcome(2), outcome(None), 1e-6)


@no_plain_counterpart
@pytest.mark.skipif(
    BACKEND != "torch", reason="A graph draws as often on each replica."
)
def test_replicas_that_draw_differently_are_warned_of():
    class Deep(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.calls = 0

        def call(self, x):
            self.calls += 1
            if self.calls % 2:
                return x
            return x + keras.random.normal(keras.ops.shape(x), seed=3)

    model = _compiled(2, lambda: draws.stack((7,), Deep()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit(**_table(12), batch_size=6, verbose=0, epochs=2)
    texts = [str(each.message) for each in told]
    assert sum("made different random draws" in each for each in texts) == 1


@no_plain_counterpart
@pytest.mark.skipif(IS_JAX, reason="One program on JAX shuffles all rows.")
def test_a_shuffle_of_rows_is_warned_of():
    model = _compiled(2, draws.augmented(lambda: layers.MixUp(name="mixing")))
    data = draws.pictures(12)
    with pytest.warns(UserWarning, match="'mixing' shuffles the rows"):
        model.fit(**data, batch_size=6, verbose=0)
    # A second warning would be an error.
    model.fit(**data, batch_size=6, verbose=0)


def test_two_models_that_train_at_once():
    """And a plain one beside them, whose numbers are those it has alone."""
    kinds = {"first": 2, "second": 3, "plain": None}
    ready = threading.Barrier(len(kinds))
    found = {}

    def run(name, num_replicas, wait):
        with scope(num_replicas):
            model = draws.mlp(7)
            model.compile("sgd", "mse", jit_compile=JIT)
        rng = np.random.default_rng(4)
        model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.weights])
        wait()
        model.fit(**_table(43), **FIT, epochs=3)
        found[name] = state_of(model)

    threads = [
        threading.Thread(target=run, args=(*each, ready.wait))
        for each in kinds.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run("alone", None, lambda: None)
    assert_same(found["plain"], found["alone"], 0, 0)
    for name in ("first", "second"):
        assert_same(found[name], found["alone"], 1e-6)


def _always_dropout(num_replicas):
    build = models.sequence(models.AlwaysDropout, inputs=(FEATURES,))
    return _compiled(num_replicas, build)


def _masks(model, rows):
    ones = np.ones((rows, FEATURES), "float32")
    return model.predict(ones, batch_size=rows, verbose=0) > 0


@pytest.mark.smoke
def test_masks_differ_between_rows_and_steps():
    model = _always_dropout(4)
    masks = np.concatenate([_masks(model, 8) for _ in range(3)])
    assert 0.35 < masks.mean() < 0.65
    assert len({mask.tobytes() for mask in masks}) == 24


@no_plain_counterpart
def test_seed_states_are_plain():
    """The stored seeds are one device's: a checkpoint has one stream."""

    def seeds(num_replicas):
        model = _always_dropout(num_replicas)
        _masks(model, 8)
        generator = model.layers[-1].generator
        return keras.ops.convert_to_numpy(generator.state.value).tolist()

    assert seeds(3) == seeds(None)
