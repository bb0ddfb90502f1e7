"""After a step fails on JAX' devices, weights are good and `fit` goes on.

The failures of all backends are in `tests/nothing_lost`.
"""

import itertools
import signal
import threading

import jax
import keras
import numpy as np
import pytest

import keras_dist
from keras_dist_jax.fit import epoch_copy
from keras_dist_jax.placement import arrays
from parity import harness

REPLICAS = pytest.mark.parametrize("num_replicas", [1, 2])


class Boom(Exception):
    """Raised by the tests."""


def state_variables(model):
    own = [model.optimizer.variables, model.metrics_variables]
    return [*model.variables, *itertools.chain(*own)]


def weights_of(model):
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Trajectory:
    """The weights after each step of `fit`, batches of 8 unshuffled."""

    def __init__(self, model, data):
        model.optimizer.iterations.assign(0)
        self.variables = [*model.variables, *model.optimizer.variables]
        self.model, self.start = model, weights_of(model)
        self.states = [model.get_weights()]
        for begin in range(0, len(data[0]), 8):
            model.train_on_batch(*(a[begin : begin + 8] for a in data))
            self.states.append(model.get_weights())
        self.reset()

    def reset(self):
        for variable, value in zip(self.variables, self.start, strict=True):
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
        own = super().called
        return jax.lax.fori_loop(0, 1, lambda i, z: z + own(loss), 0.0)


class CallsBackIo(CallsBack):
    def called(self, loss):
        shape = jax.ShapeDtypeStruct((), np.float32)
        return jax.experimental.io_callback(self.on_host, shape, loss)


class Debugs(CallsBack):
    def called(self, loss):
        jax.debug.callback(lambda v: self.on_host(v) and None, loss)
        return 0.0


@pytest.fixture
def fails(make_model, data):
    """Fits a model that calls back, and then again so that it fails."""

    def make(num_replicas=2, step=3, cls=CallsBack, strategy=None, **kwargs):
        model = make_model(num_replicas, cls=cls, strategy=strategy)
        fit(model, data)
        before = weights_of(model)
        kept = [np.array(v) for v in state_variables(model)]
        model.fails_at = model.seen + step
        with pytest.raises(Exception, match="on the host") as info:
            fit(model, data, **kwargs)
        return model, before, kept, info.value

    return make


def on_two_devices_each(num_replicas):
    return keras_dist.MirroredStrategy(
        logical_devices=2, layout_map={".*kernel": ("logical",)}
    )


@pytest.mark.parametrize(
    ("num_replicas", "strategy"),
    [(1, None), (4, None), (2, harness.sharded), (2, on_two_devices_each)],
)
@pytest.mark.parametrize("step", [1, 8])
def test_a_step_that_fails_on_the_device(
    fails, data, num_replicas, strategy, step
):
    model, at_start, *_ = fails(num_replicas, step, strategy=strategy)
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
def test_other_callbacks_that_fail_on_the_device(fails, data, cls):
    model, *_, error = fails(cls=cls)
    assert isinstance(error, Boom)
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


def test_an_epoch_before_the_failure_is_kept(fails):
    model, *_ = fails(step=8 + 3, epochs=2)
    assert int(model.optimizer.iterations) == 16


def test_metrics_that_are_reset_within_an_epoch(fails, data):
    """By a callback that does not ask Keras for its `model`."""
    reset = keras.callbacks.Callback()
    reset.on_train_batch_end = lambda batch, logs: reset._model.reset_metrics()
    model, *_ = fails(callbacks=[reset])
    assert int(model.optimizer.iterations) == 8
    fit(model, data)


@REPLICAS
def test_without_a_copy_an_error_says_what_is_lost(
    fails, data, num_replicas, monkeypatch
):
    monkeypatch.setenv("KERAS_DIST_EPOCH_COPY", "never")
    model, _, kept, error = fails(num_replicas)
    (note,) = error.__notes__
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
def test_callbacks_read_and_write_the_state(trained, data, num_replicas):
    model = trained(num_replicas)
    trajectory = Trajectory(model, data)

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            trajectory.assert_at(batch + 1)  # through a closure
            self.model.predict(data[0], verbose=0)
            assert int(self.model.optimizer.iterations) == batch + 1

    fit(model, data, callbacks=[Reads()])
    trajectory.assert_at(8)


@pytest.mark.parametrize("at_once", [False, True])
def test_models_in_other_threads(trained, data, at_once):
    """In turns, or each in a thread of its own."""
    models = [trained(n) for n in (2, 4, None)]

    def run(*chosen):
        for model in chosen * 2:
            fit(model, data, epochs=10 if at_once else 1)

    each = [(model,) for model in models[:2]] if at_once else [models]
    threads = [threading.Thread(target=run, args=args) for args in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = (model.get_weights() for model in models[: 3 - at_once])
    for weights in others:
        for one, other in zip(weights, first, strict=True):
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
