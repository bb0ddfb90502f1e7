"""One test for each kind of failure: weights, and `fit` afterwards."""

import itertools
import signal
import threading

import jax
import keras
import numpy as np
import pytest

from keras_dist_jax.fit import epoch_copy
from keras_dist_jax.placement import arrays
from keras_versions import READS_AHEAD

REPLICAS = pytest.mark.parametrize("num_replicas", [1, 2])


class Boom(Exception):
    """Raised by the tests."""


def weights_of(model):
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Trajectory:
    """The weights after each step of `fit`, batches of 8 unshuffled."""

    def __init__(self, model, data):
        self.model = model
        self.start = model.get_weights()
        self.start_optimizer = [np.array(v) for v in model.optimizer.variables]
        self.states = [model.get_weights()]
        for begin in range(0, len(data[0]), 8):
            model.train_on_batch(*(a[begin : begin + 8] for a in data))
            self.states.append(model.get_weights())
        self.reset()

    def reset(self):
        self.model.set_weights(self.start)
        for variable, value in zip(
            self.model.optimizer.variables, self.start_optimizer, strict=True
        ):
            variable.assign(value)

    def assert_at(self, step):
        """The model is as it was after so many steps."""
        assert int(self.model.optimizer.iterations) == step
        for got, expected in zip(
            self.model.get_weights(), self.states[step], strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def trained(make_model, data):
    def make(num_replicas, **kwargs):
        model = make_model(num_replicas, **kwargs)
        model.train_on_batch(data[0][:8], data[1][:8])
        return model

    return make


def fit(model, data, **kwargs):
    kwargs = {"batch_size": 8, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(*data, **kwargs)


@REPLICAS
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_data(trained, data, num_replicas, error):
    model = trained(num_replicas)
    model.optimizer.iterations.assign(0)
    trajectory = Trajectory(model, data)

    def batches():
        for begin in range(0, 24, 8):
            yield tuple(a[begin : begin + 8] for a in data)
        raise error

    with pytest.raises(error):
        model.fit(batches(), steps_per_epoch=9, shuffle=False, verbose=0)
    trajectory.assert_at(2 if READS_AHEAD else 3)
    fit(model, data)


@REPLICAS
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["begin", "end"])
def test_an_exception_in_a_callback(trained, data, num_replicas, error, when):
    model = trained(num_replicas)
    model.optimizer.iterations.assign(0)
    trajectory = Trajectory(model, data)

    def fail(batch, logs):
        if batch == 2:
            raise error

    callback = keras.callbacks.LambdaCallback(
        **{f"on_train_batch_{when}": fail}
    )
    with pytest.raises(error):
        fit(model, data, callbacks=[callback])
    trajectory.assert_at(2 if when == "begin" else 3)
    fit(model, data)


@REPLICAS
def test_wrong_shapes_in_the_first_batch(trained, data, num_replicas):
    model = trained(num_replicas)
    before = weights_of(model)
    x, y = data
    with pytest.raises(ValueError, match="incompatible"):
        model.fit(x[:, :5], y, verbose=0)
    assert_same(weights_of(model), before)
    for method in (model.evaluate, model.train_on_batch, model.test_on_batch):
        with pytest.raises(ValueError, match="incompatible"):
            method(x[:8, :5], y[:8])
        assert_same(weights_of(model), before)
    for method in (model.predict, model.predict_on_batch):
        with pytest.raises(ValueError, match="incompatible"):
            method(x[:8, :5])
        assert_same(weights_of(model), before)
    fit(model, data)


@REPLICAS
def test_wrong_shapes_in_a_later_batch(trained, data, num_replicas):
    model = trained(num_replicas)
    model.optimizer.iterations.assign(0)
    trajectory = Trajectory(model, data)
    x, y = data

    def batches():
        yield x[:8], y[:8]
        yield x[8:16], y[8:16]
        yield x[:8, :5], y[:8]

    with pytest.raises(ValueError, match="incompatible"):
        model.fit(batches(), steps_per_epoch=3, shuffle=False, verbose=0)
    trajectory.assert_at(2)
    fit(model, data)


class Failing(keras.Sequential):
    """A model whose steps can be told to fail, in several ways."""

    trace = None

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        if self.trace is not None:
            raise self.trace
        return logs, state


@REPLICAS
def test_an_exception_while_the_step_is_traced(make_model, data, num_replicas):
    model = make_model(num_replicas, cls=Failing)
    for layer in model.layers:
        layer.kernel_regularizer = keras.regularizers.L2(1e-3)
    before = model.get_weights()
    model.trace = Boom()
    with pytest.raises(Boom):
        fit(model, data)
    assert_same(model.get_weights(), before)
    model.trace = None
    fit(model, data)


@REPLICAS
def test_an_exception_in_the_traced_loss(make_model, data, num_replicas):
    # Keras keeps the activity loss of a trace that failed, and would leave
    # it out of the next one.
    def train(fails):
        failing = [False]

        def loss(y_true, y_pred):
            if failing[0]:
                raise Boom
            return keras.ops.mean(keras.ops.square(y_pred - 1), axis=-1)

        model = make_model(num_replicas, loss=loss, optimizer="sgd")
        model.layers[0].activity_regularizer = keras.regularizers.L2(1.0)
        fit(model, data)
        before = model.get_weights()
        failing[0] = fails
        if fails:
            with pytest.raises(Boom):
                fit(model, data, batch_size=16)
        assert_same(model.get_weights(), before)
        failing[0] = False
        fit(model, data, batch_size=16)
        return model.get_weights()

    assert_same(train(fails=True), train(fails=False))


class CallsBack(keras.Sequential):
    """A model whose steps call a function on the host."""

    def on_host(self, loss):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == getattr(self, "fails_at", None):
            raise Boom("on the host")
        return np.float32(0)

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        zero = self.called(logs["loss"])
        return {**logs, "loss": logs["loss"] + zero}, state

    def called(self, loss):
        shape = jax.ShapeDtypeStruct((), np.float32)
        return jax.pure_callback(self.on_host, shape, loss)


class CallsBackInLoop(CallsBack):
    def called(self, loss):
        return jax.lax.fori_loop(
            0,
            1,
            lambda i, z: z + super(CallsBackInLoop, self).called(loss),
            0.0,
        )


class CallsBackIo(CallsBack):
    def called(self, loss):
        shape = jax.ShapeDtypeStruct((), np.float32)
        io_callback = jax.experimental.io_callback
        return io_callback(self.on_host, shape, loss)


class Debugs(CallsBack):
    def called(self, loss):
        jax.debug.callback(lambda v: self.on_host(v) and None, loss)
        return 0.0


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("step", [1, 8])
def test_a_step_that_fails_on_the_device(make_model, data, num_replicas, step):
    model = make_model(num_replicas, cls=CallsBack)
    fit(model, data)
    at_start = weights_of(model)
    model.fails_at = model.seen + step
    with pytest.raises(Exception, match="on the host"):
        fit(model, data)
    # The epoch's metrics are not part of what is kept.
    assert int(model.optimizer.iterations) == 8
    skip = {id(v) for m in model.metrics for v in m.variables}
    variables = [*model.variables, *model.optimizer.variables]
    for variable, expected in zip(variables, at_start, strict=True):
        if id(variable) not in skip:
            np.testing.assert_array_equal(np.array(variable), expected)
    fit(model, data)
    assert int(model.optimizer.iterations) == 16


@pytest.mark.parametrize("cls", [CallsBackInLoop, CallsBackIo, Debugs])
def test_other_callbacks_that_fail_on_the_device(make_model, data, cls):
    model = make_model(2, cls=cls)
    fit(model, data)
    model.fails_at = model.seen + 3
    with pytest.raises(Boom, match="on the host"):
        fit(model, data)
    assert int(model.optimizer.iterations) == 8
    fit(model, data)


def counted_as_on_accelerators(make_model, cls, monkeypatch):
    """A model whose steps are not edited, and a list of their traces."""
    traced = []

    class Counts(cls):
        def train_step(self, state, data):
            traced.append(self)
            return super().train_step(state, data)

    model = make_model(2, cls=Counts)
    layout = model.variables[0].distribute_strategy.executor.layout
    monkeypatch.setattr(layout, "edits", ())
    return model, traced


@pytest.mark.parametrize("cls", [CallsBack, CallsBackInLoop, Debugs])
def test_callbacks_are_found_where_a_step_is_not_changed(
    make_model, data, cls, monkeypatch
):
    """On accelerators, only a step that calls back is."""
    model, traced = counted_as_on_accelerators(make_model, cls, monkeypatch)
    fit(model, data)
    assert len(traced) <= 2  # as it is, and with callbacks that are watched
    model.fails_at = model.seen + 3
    with pytest.raises(Boom, match="on the host"):
        fit(model, data)
    assert int(model.optimizer.iterations) == 8


def test_a_step_without_callbacks_is_traced_once(make_model, data, monkeypatch):
    model, traced = counted_as_on_accelerators(
        make_model, keras.Sequential, monkeypatch
    )
    fit(model, data)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("wish", "own"), [("never", False), ("always", True), ("", True)]
)
def test_workers_decide_together_on_a_copy(monkeypatch, wish, own):
    """Also if only one of them was told what to do."""
    monkeypatch.setenv("KERAS_DIST_EPOCH_COPY", wish)
    asked = []

    class Layout:
        def is_for_all(self, flag):
            asked.append(flag)
            return False  # another worker has no room

    assert epoch_copy.copied([[]], "model", Layout()) is None
    assert asked == [own]


def test_an_epoch_before_the_failure_is_kept(make_model, data):
    model = make_model(2, cls=CallsBack)
    fit(model, data)
    model.fails_at = model.seen + 8 + 3
    with pytest.raises(Boom, match="on the host"):
        fit(model, data, epochs=2)
    assert int(model.optimizer.iterations) == 16


def test_metrics_that_are_reset_within_an_epoch(make_model, data):
    """By a callback that has the model from elsewhere."""
    model = make_model(2, cls=CallsBack)
    fit(model, data)
    model.fails_at = model.seen + 3
    reset = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: model.reset_metrics()
    )
    with pytest.raises(Exception, match="on the host"):
        fit(model, data, callbacks=[reset])
    assert int(model.optimizer.iterations) == 8
    fit(model, data)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_without_a_copy_an_error_says_what_is_lost(
    make_model, data, num_replicas, monkeypatch
):
    monkeypatch.setenv("KERAS_DIST_EPOCH_COPY", "never")
    model = make_model(num_replicas, cls=CallsBack)
    fit(model, data)
    kept = [np.array(v) for v in state_variables(model)]
    model.fails_at = model.seen + 3
    with pytest.raises(Exception, match="on the host") as info:
        fit(model, data)
    (note,) = info.value.__notes__
    assert "kept no copy" in note
    assert "checkpoint" in note
    for variable, value in zip(state_variables(model), kept, strict=True):
        variable.assign(value)  # as from a checkpoint
    fit(model, data)
    assert int(model.optimizer.iterations) == 16


def test_a_copy_that_the_host_has_no_memory_for(
    make_model, data, monkeypatch, capfd
):
    copies = []
    original = arrays.to_host
    monkeypatch.setattr(
        arrays, "to_host", lambda each: copies.append(1) or original(each)
    )
    model = make_model(2)
    fit(model, data)
    size = sum(v.value.nbytes for v in state_variables(model))
    for left, expected in ((4 * size + 9999, True), (4 * size - 4, False)):
        monkeypatch.setattr(epoch_copy, "free_memory", lambda n=left: n)
        copies.clear()
        fit(model, data, epochs=2)
        assert bool(copies) == expected
    said = capfd.readouterr().err
    assert said.count("keeps no copy") == 1
    monkeypatch.setenv("KERAS_DIST_EPOCH_COPY", "always")
    fit(model, data)
    assert copies
    monkeypatch.setenv("KERAS_DIST_EPOCH_COPY", "sometimes")
    with pytest.raises(ValueError, match="'sometimes'"):
        fit(model, data)


def state_variables(model):
    own = [model.optimizer.variables, model.metrics_variables]
    return [*model.variables, *itertools.chain(*own)]


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    assert epoch_copy.free_memory() > 2**20
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert epoch_copy._left_in_group(str(tmp_path)) == 600
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 50\n")
    assert epoch_copy._left_in_group(str(tmp_path)) == 650
    (tmp_path / "memory.max").write_text("max\n")
    assert epoch_copy._left_in_group(str(tmp_path)) is None
    assert epoch_copy._left_in_group(str(tmp_path / "none")) is None


@REPLICAS
def test_train_on_batch_that_fails_on_the_device(
    make_model, data, num_replicas
):
    model = make_model(num_replicas, cls=CallsBack)
    fit(model, data)
    before = model.get_weights()
    model.fails_at = model.seen + 1
    with pytest.raises(Exception, match="on the host"):
        model.train_on_batch(*data)
    assert_same(model.get_weights(), before)
    model.train_on_batch(*data)


# An interrupt in the runtime's callback of the garbage collector is swallowed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_time(trained, data):
    model = trained(2)
    model.optimizer.iterations.assign(0)
    trajectory = Trajectory(model, data)
    fit(model, data)

    def interrupt(_, frame):
        while frame is not None:
            # Python's own locks don't survive an interrupt.
            if "threading" in frame.f_code.co_filename:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    rng = np.random.default_rng(0)
    try:
        for _ in range(30):
            trajectory.reset()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.03))
                fit(model, data)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            trajectory.assert_at(int(model.optimizer.iterations))
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert interrupted
    trajectory.reset()
    fit(model, data)
    trajectory.assert_at(8)


@REPLICAS
def test_an_array_that_was_read_outlives_the_steps(trained, data, num_replicas):
    model = trained(num_replicas)
    held = [variable.value for variable in model.trainable_variables]
    before = [np.array(value) for value in held]
    fit(model, data)
    for value, old in zip(held, before, strict=True):
        np.testing.assert_array_equal(value, old)


@REPLICAS
def test_callbacks_read_and_write_the_state(trained, data, num_replicas):
    model = trained(num_replicas)
    model.optimizer.iterations.assign(0)
    trajectory = Trajectory(model, data)

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            trajectory.assert_at(batch + 1)  # through a closure
            self.model.predict(data[0], verbose=0)
            assert int(self.model.optimizer.iterations) == batch + 1

    fit(model, data, callbacks=[Reads()])
    trajectory.assert_at(8)


def test_models_in_turns_and_in_another_thread(trained, data):
    models = [trained(n) for n in (2, 4, None)]
    results = []

    def run():
        for _ in range(2):
            for model in models:
                results.append(fit(model, data).history["loss"][0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for start in range(0, 6, 3):
        turn = results[start : start + 3]
        np.testing.assert_allclose(turn, turn[0], rtol=1e-5)


def test_two_threads_at_once(trained, data):
    models = [trained(2), trained(4)]
    threads = [
        threading.Thread(target=fit, args=(m, data), kwargs={"epochs": 20})
        for m in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(
        models[0].get_weights(), models[1].get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_nothing_is_kept_after_fit(trained, data, live_bytes):
    model = trained(2)
    fit(model, data)
    model.predict(data[0], verbose=0)
    before = live_bytes()
    fit(model, data, epochs=2, validation_data=data)
    model.evaluate(*data, verbose=0)
    model.predict(data[0], verbose=0)
    model.set_weights([w + 1 for w in model.get_weights()])
    assert live_bytes() <= before + 64
