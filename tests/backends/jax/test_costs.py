"""Training under a strategy costs what one device's does, and one all-reduce.

Counted are calls, collectives, programs and bytes.
"""

import jax
import keras
import pytest

import keras_dist
from backends.jax.measures import compiled
from backends.jax.measures import count_all_reduces
from backends.jax.measures import size_of
from backends.jax.measures import step_of
from backends.jax.measures import text_of
from keras_versions import READS_AHEAD
from parity import harness


def train_program(model, data, batch_size=16):
    """The one program that `fit` compiles for a model's training step."""
    return step_of(model, *data, batch_size)


def state_bytes(model):
    return size_of([*model.variables, *model.optimizer.variables])


def test_calls_against_data_parallel_and_over_replicas(
    calls_a_step, make_model, data
):
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    with distribution.scope():
        theirs = calls_a_step(make_model(metrics=["accuracy"]), *data)
    two = calls_a_step(make_model(2, metrics=["accuracy"]), *data)
    four = calls_a_step(make_model(4, metrics=["accuracy"]), *data)
    # Keras puts the batch that it reads ahead into host memory first, which
    # its own distribution doesn't need.
    assert two <= (0.7 if READS_AHEAD else 0.6) * theirs
    assert four <= 1.05 * two


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("num_hidden", [1, 19])
def test_one_all_reduce_however_many_variables(
    make_model, data, num_replicas, num_hidden
):
    model = make_model(
        num_replicas, layers=[16] * num_hidden, metrics=["accuracy"]
    )
    assert count_all_reduces(train_program(model, data)) == 1


def test_evaluate_has_at_most_one_all_reduce(make_model, data):
    model = make_model(2, metrics=["accuracy"])
    (program,) = compiled(
        "test_step", lambda: model.evaluate(*data, batch_size=16, verbose=0)
    )
    assert count_all_reduces(program) <= 1


def test_a_batch_that_does_not_divide_is_cut_all_the_same(make_model, data):
    two, four, ragged, few = (
        train_program(
            make_model(replicas, layers=[64]), [a[:rows] for a in data], rows
        )
        for replicas, rows in ((2, 16), (4, 16), (4, 15), (4, 3))
    )
    # The program does not grow with the replicas.
    assert len(text_of(four)) == pytest.approx(len(text_of(two)), rel=0.03)
    # Some more than one: the shares' sizes differ in the program.
    assert 1 <= count_all_reduces(ragged) <= 3
    assert len(text_of(ragged)) < 1.5 * len(text_of(four))
    # Each replica computes all of a batch with fewer rows than there are.
    assert count_all_reduces(few) == 0


def apart(parameter):
    """Central storage on one device or several."""
    return lambda num_replicas: keras_dist.CentralStorageStrategy(
        harness.devices(num_replicas), parameter
    )


@pytest.mark.parametrize(
    ("num_replicas", "strategy"),
    [
        (1, lambda _: keras_dist.OneDeviceStrategy("cpu:3")),
        (2, harness.strategy),
        (3, harness.strategy),
        (2, apart("cpu:3")),
        (2, apart("cpu:0")),
        (2, apart(["cpu:2", "cpu:3"])),
        (2, harness.sharded),
        (4, harness.sharded_variables),
    ],
)
def test_nothing_is_compiled_after_each_shape_was_seen(
    make_model, data, compilations, num_replicas, strategy
):
    model = make_model(
        num_replicas, strategy=strategy, layers=[64], metrics=["accuracy"]
    )
    x, y = data

    def run(epochs):
        # The last batch has 14 rows, or 4 in validation.
        model.fit(
            *(x, y),
            batch_size=25,
            epochs=epochs,
            validation_data=(x[:29], y[:29]),
            verbose=0,
        )
        model.evaluate(x, y, batch_size=25, verbose=0)
        model.predict(x, batch_size=25, verbose=0)
        model.train_on_batch(x[:25], y[:25])

    # An epoch that is not the first sees variables that a step has made.
    run(epochs=2)
    assert compilations["programs"] > 0
    compilations["programs"] = 0
    run(epochs=3)
    assert compilations["programs"] == 0


def test_one_replica_compiles_no_more_than_plain_keras(
    make_model, data, compilations
):
    counts = []
    for num_replicas in (None, 1):
        model = make_model(num_replicas, layers=[8, 12, 16])
        compilations["programs"] = 0
        model.fit(*data, batch_size=16, epochs=3, verbose=0)
        counts.append(compilations["programs"])
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_live_bytes(make_model, data, live_bytes, num_replicas):
    model = make_model(num_replicas, layers=[64, 64])
    most = []

    def measure(batch, logs):
        jax.block_until_ready(logs)
        most.append(live_bytes())

    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=measure,
        on_test_batch_end=measure,
        on_predict_batch_end=measure,
    )
    kwargs = {"batch_size": 16, "verbose": 0, "callbacks": [callback]}
    model.fit(*data, epochs=2, **kwargs)
    model.evaluate(*data, **kwargs)
    model.predict(data[0], **kwargs)
    # The step's batch; Keras holds it and the next one, if it reads ahead.
    batch = 16 * (6 + 1) * 4 * (3 if READS_AHEAD else 1)
    slack = 1024
    assert max(most) <= num_replicas * (state_bytes(model) + slack) + batch


def test_a_step_works_in_the_buffers_of_the_state(make_model, data):
    model = make_model(2, layers=[64, 64])
    stats = train_program(model, data).get_compiled_memory_stats()
    assert stats.alias_size_in_bytes >= state_bytes(model)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_state_is_not_copied_between_epochs(
    make_model, data, monkeypatch, num_replicas
):
    from keras_dist_jax.placement import arrays

    copied = []
    original = arrays.copy_of
    monkeypatch.setattr(
        arrays, "copy_of", lambda a: copied.append(a.shape) or original(a)
    )
    model = make_model(num_replicas)
    model.fit(*data, batch_size=16, epochs=3, verbose=0)
    assert copied == []
    kernel = model.layers[0].kernel.value
    model.fit(*data, batch_size=16, verbose=0)
    assert copied == [kernel.shape]


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_cpu_devices_run_one_step_at_a_time(
    make_model, data, monkeypatch, steps_per_execution
):
    from keras_dist_jax.throttle import OneAtATime

    entered, late = [], []
    original = OneAtATime.enter

    def enter(throttle, owner, results):
        if entered and not all(a.is_ready() for a in entered[-1]):
            late.append(len(entered))
        # The outputs; the state is deleted by the next step.
        entered.append([results])
        original(throttle, owner, results)

    monkeypatch.setattr(OneAtATime, "enter", enter)
    model = make_model(
        4, layers=[1024, 1024], steps_per_execution=steps_per_execution
    )
    x, y = data
    model.fit(x, y, batch_size=8, verbose=0)
    model.evaluate(x, y, batch_size=8, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    assert len(entered) == 24
    assert late == []
