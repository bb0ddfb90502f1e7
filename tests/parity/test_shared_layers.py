"""A plain model follows one of a strategy with which it shares layers."""

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
from parity.harness import flat
from parity.harness import scope
from parity.harness import state_of
from parity.harness import strategy as strategy_of

DATA = models.table(21)
BASE_DATA = models.table(21, targets=3)


def _compiled_base():
    """A plain model, all of whose steps have run."""
    base = compiled(
        None,
        models.sequence(models.dense(3, activation="tanh")),
        metrics=["mae"],
    )
    base.fit(**BASE_DATA, **FIT)
    base.evaluate(**BASE_DATA, verbose=0)
    base.predict(BASE_DATA["x"], verbose=0)
    return base


def _on_top(base, kind, strategy):
    """A model of a strategy, on the layers of a plain one."""
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy else scope(None):
        if kind == "nested":
            model = keras.Sequential([base, layers.Dense(1)])
            model.build((None, 4))
        else:
            model = keras.Model(base.inputs, layers.Dense(1)(base.outputs[0]))
        model.compile("sgd", "mse", jit_compile=JIT)
    return model


def _results_of(base):
    return flat("logs", base.evaluate(**BASE_DATA, verbose=0)) | flat(
        "predict", base.predict(BASE_DATA["x"], verbose=0)
    )


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("kind", ["nested", "functional"])
def test_the_plain_model_follows(kind, num_replicas):
    """What it computed with before the training is not what it has now."""

    def outcome(strategy):
        base = _compiled_base()
        model = _on_top(base, kind, strategy)
        seen = []

        def look(batch, logs):
            seen.append(base.predict(BASE_DATA["x"], verbose=0))

        looking = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        history = model.fit(
            **DATA,
            **FIT,
            # On JAX, variables have no values of their own during `fit`.
            callbacks=[] if BACKEND == "jax" else [looking],
        ).history
        return (
            flat("history", history)
            | flat("seen", seen)
            | _results_of(base)
            | state_of(model)
        )

    strategy = None if PLAIN_ONLY else strategy_of(num_replicas)
    assert_same(outcome(strategy), outcome(None))


def _train_base_again(strategy, adopt=lambda model: None):
    base = _compiled_base()
    model = _on_top(base, "nested", strategy)
    model.fit(**DATA, **FIT)
    adopt(base)
    history = base.fit(**BASE_DATA, **FIT).history
    return flat("history", history) | _results_of(base) | state_of(model)


@pytest.mark.skipif(PLAIN_ONLY, reason="It has no plain counterpart.")
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_plain_model_is_adopted(num_replicas):
    strategy = strategy_of(num_replicas)
    assert_same(
        _train_base_again(strategy, adopt=strategy.distribute),
        _train_base_again(None),
    )


@pytest.mark.skipif(PLAIN_ONLY, reason="It has no plain counterpart.")
def test_the_plain_model_trains_on():
    """On TensorFlow, whose variables have a copy a device, an error says."""
    if BACKEND == "tensorflow":
        with pytest.raises(
            keras_dist.StrategyMismatchError,
            match=r"(?s)dense.*kernel' belongs to .*distribute\(model\)",
        ):
            _train_base_again(strategy_of(2))
        return
    assert_same(_train_base_again(strategy_of(2)), _train_base_again(None))
