"""However a model is made, and wherever it is used, it is distributed."""

import threading
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import FIT
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import distribute
from parity.harness import fitted
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of


def _compile(model, optimizer="adam"):
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=JIT)
    return model


def _unbuilt():
    return keras.Sequential(
        [layers.Dense(5, activation="tanh"), layers.Dense(1)]
    )


def _functional():
    x = layers.Input((4,))
    return keras.Model(x, layers.Dense(1)(layers.Dense(5, "tanh")(x)))


def _in_scope(make):
    def way(num_replicas, tmp_path):
        with scope(num_replicas):
            return _compile(make())

    return way


def _clone(num_replicas, tmp_path):
    original = models.mlp()
    with scope(num_replicas):
        model = _compile(keras.models.clone_model(original))
    return set_initial_weights(model)


def _load(num_replicas, tmp_path):
    path = tmp_path / "model.keras"
    model = _compile(set_initial_weights(models.mlp()))
    model.fit(**models.table(7), verbose=0)
    model.save(path)
    with scope(num_replicas):
        return keras.models.load_model(path)


def _save_in_scope(num_replicas, tmp_path):
    """Saved while distributed, loaded by plain Keras."""
    path = tmp_path / "model.keras"
    with scope(num_replicas):
        model = _compile(set_initial_weights(models.mlp()))
    model.fit(**models.table(7), verbose=0)
    model.save(path)
    return keras.models.load_model(path)


def _weights_file(num_replicas, tmp_path):
    path = tmp_path / "model.weights.h5"
    _compile(set_initial_weights(models.mlp())).save_weights(path)
    with scope(num_replicas):
        model = _compile(models.mlp())
    with warnings.catch_warnings():
        # The optimizer has no slots in the file yet: Keras says so.
        warnings.simplefilter("ignore")
        model.load_weights(path)
    return model


def _compiled_outside(num_replicas, tmp_path):
    with scope(num_replicas):
        model = set_initial_weights(models.mlp())
    return _compile(model)


def _adopted(num_replicas, tmp_path):
    model = _compile(set_initial_weights(models.mlp()))
    return distribute(model, num_replicas)


def _adopted_in_training(num_replicas, tmp_path):
    model = _compile(set_initial_weights(models.mlp()))
    model.fit(**models.table(7), verbose=0)
    return distribute(model, num_replicas)


def _adopted_then_compiled(num_replicas, tmp_path):
    model = distribute(set_initial_weights(models.mlp()), num_replicas)
    return _compile(model)


WAYS = {
    "sequential_unbuilt": _in_scope(_unbuilt),
    "subclassed": _in_scope(models.Subclassed),
    "functional": _in_scope(_functional),
    "functional_subclass": _in_scope(models.own_loss),
    "clone_model": _clone,
    "load_model": _load,
    "save": _save_in_scope,
    "load_weights": _weights_file,
    "compile_outside": _compiled_outside,
    "distribute": _adopted,
    "distribute_in_training": _adopted_in_training,
    "distribute_then_compile": _adopted_then_compiled,
}
SMOKE = ("sequential_unbuilt", "load_model", "distribute")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.smoke] if n in SMOKE else [])
        for n in WAYS
    ],
)
@pytest.mark.filterwarnings("ignore:Model .* trains on one device")
def test_ways_of_making(name, tmp_path):
    data = models.table(21)

    def outcome(num_replicas):
        keras.utils.set_random_seed(5)
        model = WAYS[name](num_replicas, tmp_path)
        history = model.fit(**data, **FIT).history
        predictions = model.predict(data["x"], batch_size=7, verbose=0)
        return (
            flat("history", history)
            | flat("predict", predictions)
            | state_of(model)
        )

    assert_same(outcome(3), outcome(None), rtol=1e-4)


def _fit_in_thread(model):
    result = []
    thread = threading.Thread(
        target=lambda: result.append(model.fit(**models.table(21), **FIT))
    )
    thread.start()
    thread.join()
    return result[0].history


@pytest.mark.parametrize("where", ["thread", "scope"])
def test_fit_anywhere(where):
    def outcome(strategy):
        keras.utils.set_random_seed(5)
        with strategy.scope() if strategy else scope(None):
            model = _compile(set_initial_weights(models.mlp()))
        if where == "thread":
            history = _fit_in_thread(model)
        else:
            with strategy.scope() if strategy else scope(None):
                history = model.fit(**models.table(21), **FIT).history
        return flat("history", history) | state_of(model)

    strategy = None
    if not PLAIN_ONLY:
        strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    assert_same(outcome(strategy), outcome(None), rtol=1e-4)


@pytest.mark.smoke
def test_steps_on_batches():
    data = models.weighted_table(21)

    def outcome(num_replicas):
        with scope(num_replicas):
            model = _compile(set_initial_weights(models.mlp()))
        logs = []
        for start, stop in ((0, 7), (7, 9), (9, 10), (10, 19)):
            batch = {name: value[start:stop] for name, value in data.items()}
            logs.append(model.train_on_batch(**batch, return_dict=True))
            model.reset_metrics()
            logs.append(model.test_on_batch(**batch, return_dict=True))
            logs.append(model.predict_on_batch(batch["x"]))
            logs.append(model.train_on_batch(batch["x"], batch["y"]))
        return flat("logs", logs) | state_of(model)

    assert_same(outcome(4), outcome(None), rtol=1e-4)


def test_class_weight_on_a_batch():
    data = models.classes(7)

    def outcome(num_replicas):
        with scope(num_replicas):
            model = set_initial_weights(models.classifier())
            model.compile(
                "sgd", "sparse_categorical_crossentropy", jit_compile=JIT
            )
        loss = model.train_on_batch(**data, class_weight={0: 1, 1: 2, 2: 0.5})
        return flat("loss", loss) | state_of(model)

    assert_same(outcome(2), outcome(None))


@pytest.mark.parametrize("order", ["one_after_the_other", "in_turns"])
def test_two_models(order):
    def outcome(num_replicas):
        keras.utils.set_random_seed(5)
        pair = []
        for make, optimizer in ((models.mlp, "adam"), (_unbuilt, "sgd")):
            with scope(num_replicas):
                pair.append(_compile(make(), optimizer))
        rounds = (
            [pair[0], pair[0], pair[1], pair[1]]
            if order == "one_after_the_other"
            else pair * 2
        )
        logs = [
            model.fit(**models.table(21), **FIT | {"epochs": 1}).history
            for model in rounds
        ]
        return (
            flat("history", logs)
            | flat("first", list(state_of(pair[0]).values()))
            | flat("second", list(state_of(pair[1]).values()))
        )

    assert_same(outcome(3), outcome(None), rtol=1e-4)


def test_two_strategies():
    """A model on two replicas and one on three, in turns."""

    def outcome(counts):
        keras.utils.set_random_seed(5)
        pair = []
        for count in counts:
            with scope(count):
                pair.append(_compile(set_initial_weights(models.mlp()), "sgd"))
        for model in pair * 2:
            model.fit(**models.table(21), **FIT | {"epochs": 1})
        return flat("all", [list(state_of(m).values()) for m in pair])

    assert_same(outcome((2, 3)), outcome((None, None)))


def test_compile_again():
    """Another optimizer and loss on the same model."""

    def outcome(num_replicas):
        with scope(num_replicas):
            model = _compile(set_initial_weights(models.mlp()))
        model.fit(**models.table(21), **FIT | {"epochs": 1})
        model.compile("sgd", "mae", jit_compile=JIT)
        return fitted(model, **models.table(21), **FIT | {"epochs": 1})

    assert_same(outcome(2), outcome(None), rtol=1e-4)


def test_freeze_then_compile_again():
    def outcome(num_replicas):
        with scope(num_replicas):
            model = _compile(set_initial_weights(models.mlp()), "sgd")
        model.fit(**models.table(21), **FIT | {"epochs": 1})
        model.layers[0].trainable = False
        _compile(model, "sgd")
        model.fit(**models.table(21), **FIT | {"epochs": 1})
        return state_of(model)

    assert_same(outcome(3), outcome(None))


@pytest.mark.skipif(PLAIN_ONLY, reason="It has no plain counterpart.")
def test_models_made_outside_are_plain():
    model = _compile(set_initial_weights(models.mlp()), "sgd")
    scope = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).scope()
    with scope, pytest.warns(UserWarning, match="runs on one device"):
        model.fit(**models.table(21), **FIT)
    other = _compile(set_initial_weights(models.mlp()), "sgd")
    other.fit(**models.table(21), **FIT)
    assert_same(state_of(model), state_of(other), rtol=0, atol=0)
    assert "train_step" not in vars(model)


def test_one_device_is_plain_keras():
    """The same numbers to the last bit, random layers included."""

    def outcome(context):
        keras.utils.set_random_seed(5)
        with context:
            model = models.sequence(
                models.dense(5),
                layers.BatchNormalization,
                lambda: layers.Dropout(0.5),
                models.dense(),
            )()
            _compile(set_initial_weights(model))
        return fitted(
            model, **models.weighted_table(21), **FIT | {"shuffle": True}
        )

    one = scope(None)
    if not PLAIN_ONLY:
        one = keras_dist.OneDeviceStrategy("cpu:0").scope()
    assert_same(outcome(one), outcome(scope(None)), rtol=0, atol=0)


@pytest.mark.skipif(
    BACKEND == "torch",
    reason="Compiling a step with inductor takes longer than this suite.",
)
def test_jit_compile():
    def outcome(num_replicas):
        with scope(num_replicas):
            model = set_initial_weights(models.mlp())
            model.compile("sgd", "mse", jit_compile=True)
        if BACKEND == "tensorflow" and num_replicas and not PLAIN_ONLY:
            with pytest.warns(UserWarning, match="jit_compile"):
                model.fit(**models.table(21), **FIT)
        else:
            model.fit(**models.table(21), **FIT)
        return state_of(model)

    assert_same(outcome(2), outcome(None))


def test_jit_compile_by_default():
    """`"auto"`, as Keras resolves it, without a word."""

    def outcome(num_replicas):
        with scope(num_replicas):
            model = set_initial_weights(models.mlp())
            model.compile("sgd", "mse")
        model.fit(**models.table(21), **FIT)
        return state_of(model)

    assert_same(outcome(2), outcome(None))


def test_initial_weights_are_those_of_one_device():
    def outcome(num_replicas):
        keras.utils.set_random_seed(5)
        with scope(num_replicas):
            return state_of(models.attention())

    assert_same(outcome(3), outcome(None), rtol=0, atol=0)


def test_set_and_get_weights():
    with scope(3):
        model = _compile(models.mlp())
    values = [
        np.full(w.shape, i, "float32") for i, w in enumerate(model.weights)
    ]
    model.set_weights(values)
    for got, want in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(got, want)
    model.weights[0].assign_add(np.ones(model.weights[0].shape, "float32"))
    np.testing.assert_array_equal(model.get_weights()[0], values[0] + 1)
