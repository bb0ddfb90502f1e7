"""Wherever a model is made and used, it trains as on one device."""

import threading
import warnings

import keras
import pytest
from keras import layers

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import FIT
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import distribute
from parity.harness import fitted
from parity.harness import flat
from parity.harness import results
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

DATA = models.table(21)
ONE_EPOCH = FIT | {"epochs": 1}


def _compile(model, optimizer="adam"):
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=JIT)
    return model


def _mlp(num_replicas=None, optimizer="adam"):
    return compiled(num_replicas, models.mlp, optimizer, metrics=["mae"])


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


def _saved(model, tmp_path):
    path = tmp_path / "model.keras"
    model.fit(**models.table(7), verbose=0)
    model.save(path)
    return path


def _load(num_replicas, tmp_path):
    path = _saved(_mlp(), tmp_path)
    with scope(num_replicas):
        return keras.models.load_model(path)


def _save_in_scope(num_replicas, tmp_path):
    """Saved while distributed, loaded by plain Keras."""
    return keras.models.load_model(_saved(_mlp(num_replicas), tmp_path))


def _weights_file(num_replicas, tmp_path):
    path = tmp_path / "model.weights.h5"
    _mlp().save_weights(path)
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
    return distribute(_mlp(), num_replicas)


def _adopted_in_training(num_replicas, tmp_path):
    model = _mlp()
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
    def outcome(num_replicas):
        keras.utils.set_random_seed(5)
        return results(WAYS[name](num_replicas, tmp_path), DATA)

    assert_same(outcome(3), outcome(None), rtol=1e-4)


@pytest.mark.parametrize("where", ["thread", "scope"])
def test_fit_anywhere(where):
    def outcome(num_replicas):
        model = _mlp(num_replicas)
        found = {}

        def train():
            found.update(fitted(model, **DATA, **FIT))

        if where == "thread":
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        elif num_replicas is None or PLAIN_ONLY:
            train()
        else:
            with model.layers[0].kernel.distribute_strategy.scope():
                train()
        return found

    assert_same(outcome(2), outcome(None), rtol=1e-4)


@pytest.mark.smoke
def test_steps_on_batches():
    data = models.weighted_table(21)

    def outcome(num_replicas):
        model = _mlp(num_replicas)
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
        loss = "sparse_categorical_crossentropy"
        model = compiled(num_replicas, models.classifier, loss=loss)
        loss = model.train_on_batch(**data, class_weight={0: 1, 1: 2, 2: 0.5})
        return flat("loss", loss) | state_of(model)

    assert_same(outcome(2), outcome(None))


def test_models_and_strategies_in_turns():
    """Two models on three replicas, one of them made late, and one on two."""

    def outcome(*counts):
        keras.utils.set_random_seed(5)
        trained = [_mlp(counts[0]), _mlp(counts[1], "sgd")]
        with scope(counts[0]):
            trained.append(_compile(_unbuilt(), "sgd"))
        turns = [trained[0], *trained, *trained, trained[2]]
        logs = [model.fit(**DATA, **ONE_EPOCH).history for model in turns]
        states = [list(state_of(model).values()) for model in trained]
        return flat("history", logs) | flat("states", states)

    assert_same(outcome(3, 2), outcome(None, None), rtol=1e-4)


def test_compile_again():
    """Another optimizer and loss on the same model, then a frozen layer."""

    def outcome(num_replicas):
        model = _mlp(num_replicas)
        model.fit(**DATA, **ONE_EPOCH)
        model.compile("sgd", "mae", jit_compile=JIT)
        found = fitted(model, **DATA, **ONE_EPOCH)
        model.layers[0].trainable = False
        _compile(model, "sgd").fit(**DATA, **ONE_EPOCH)
        return found | {f"frozen/{k}": v for k, v in state_of(model).items()}

    assert_same(outcome(2), outcome(None), rtol=1e-4)


@pytest.mark.skipif(PLAIN_ONLY, reason="It has no plain counterpart.")
def test_models_made_outside_are_plain():
    model, other = _mlp(optimizer="sgd"), _mlp(optimizer="sgd")
    scope = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).scope()
    with scope, pytest.warns(UserWarning, match="runs on one device"):
        model.fit(**DATA, **FIT)
    other.fit(**DATA, **FIT)
    assert_same(state_of(model), state_of(other), rtol=0, atol=0)
    assert "train_step" not in vars(model)


def test_one_device_is_plain_keras():
    """The same numbers to the last bit, random layers included."""
    build = models.sequence(
        models.dense(5),
        layers.BatchNormalization,
        lambda: layers.Dropout(0.5),
        models.dense(),
    )

    def outcome(count):
        keras.utils.set_random_seed(5)
        model = compiled(
            count,
            build,
            "adam",
            lambda _: keras_dist.OneDeviceStrategy("cpu:0"),
        )
        options = FIT | {"shuffle": True}
        return fitted(model, **models.weighted_table(21), **options)

    assert_same(outcome(1), outcome(None), rtol=0, atol=0)


@pytest.mark.skipif(
    BACKEND == "torch",
    reason="Compiling a step with inductor takes longer than this suite.",
)
def test_jit_compile():
    def outcome(num_replicas):
        model = compiled(num_replicas, models.mlp, jit_compile=True)
        if BACKEND == "tensorflow" and num_replicas and not PLAIN_ONLY:
            with pytest.warns(UserWarning, match="jit_compile"):
                model.fit(**DATA, **FIT)
        else:
            model.fit(**DATA, **FIT)
        return state_of(model)

    assert_same(outcome(2), outcome(None))
