"""A model that several threads use keeps its weights and its results."""

import keras
import pytest
from keras import layers

from nothing_lost.in_threads import in_threads
from parity import models
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

FIT = {"shuffle": False, "verbose": 0}

ONE_RUN_ON_JAX = pytest.mark.skipif(
    BACKEND == "jax",
    reason="Keras on JAX keeps the state of a run on the model: on one device "
    "two runs at once fail too.",
)


def _trained(num_replicas):
    keras.utils.set_random_seed(5)
    with scope(num_replicas):
        model = models.sequence(
            models.dense(5, activation="tanh"),
            layers.BatchNormalization,
            models.dense(),
        )()
        set_initial_weights(model)
        model.compile("sgd", "mse", jit_compile=JIT)
    model.fit(**models.table(14), batch_size=7, **FIT)
    return model


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_another_thread_brings_a_new_shape(num_replicas):
    """What is compiled there has nothing that the main thread has made."""

    def outcome(count):
        model = _trained(count)

        def job():
            history = model.fit(**models.table(9), batch_size=9, **FIT).history
            rows = models.table(17)["x"]
            return history, model.predict(rows, batch_size=17, verbose=0)

        return flat("thread", in_threads(job)) | state_of(model)

    assert_same(outcome(num_replicas), outcome(None))


@ONE_RUN_ON_JAX
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_threads_predict_at_once(num_replicas):
    def outcome(count):
        model = _trained(count)
        model.predict(models.table(8)["x"], batch_size=4, verbose=0)

        def predict(rows):
            data = models.table(rows)["x"]
            return [
                model.predict(data, batch_size=4, verbose=0) for _ in range(3)
            ]

        seen = in_threads(lambda: predict(8), lambda: predict(12))
        model.fit(**models.table(14), batch_size=7, **FIT)
        return flat("seen", seen) | state_of(model)

    assert_same(outcome(num_replicas), outcome(None))


@ONE_RUN_ON_JAX
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_another_thread_predicts_during_fit(num_replicas):
    """Its run is not part of the one that is under way."""

    def outcome(count):
        model = _trained(count)
        # The thread compiles for another shape, not for the first.
        model.predict(models.table(8)["x"], batch_size=4, verbose=0)
        rows = models.table(11)["x"]
        seen = []

        def look(batch, logs):
            seen.append(
                in_threads(
                    lambda: model.predict(rows, batch_size=11, verbose=0)
                )
            )

        looking = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        model.fit(**models.table(14), batch_size=7, callbacks=[looking], **FIT)
        return flat("seen", seen) | state_of(model)

    assert_same(outcome(num_replicas), outcome(None))
