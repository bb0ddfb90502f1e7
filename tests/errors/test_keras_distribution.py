"""`keras.distribution` beside a strategy is refused where the two meet."""

import contextlib

import keras
import numpy as np
import pytest

import keras_dist
from errors.helpers import assert_weights
from keras_dist.errors import StrategyMismatchError
from keras_versions import has_distributions

pytestmark = has_distributions

D = keras.distribution
X = np.ones((8, 2), "float32")
DEVICES = ["cpu:0", "cpu:1"]


def refused():
    """Expects the refusal; kept by nobody, or it would keep the strategy."""
    return pytest.raises(
        StrategyMismatchError, match="`keras.distribution` and"
    )


def _data_parallel():
    return D.DataParallel(device_mesh=_mesh((2,), ["batch"]))


def _model_parallel():
    layouts = D.LayoutMap(_mesh((1, 2), ["batch", "model"]))
    layouts[".*kernel"] = (None, "model")
    return D.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def _mesh(shape, names):
    return D.DeviceMesh(shape, names, DEVICES)


@pytest.fixture(params=[_data_parallel, _model_parallel])
def distribution(request):
    return request.param()


def _one():
    return keras_dist.OneDeviceStrategy("cpu:0")


def _mirrored():
    return keras_dist.MirroredStrategy(DEVICES)


each = pytest.mark.parametrize("make", [_one, _mirrored])


@contextlib.contextmanager
def as_set(distribution):
    D.set_distribution(distribution)
    try:
        yield
    finally:
        D.set_distribution(None)


def _model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@each
def test_before_and_inside_of_the_scope(make, distribution):
    strategy = make()
    for other in (as_set(distribution), distribution.scope()):
        with other, refused(), strategy.scope():
            pass
    assert not keras_dist.has_strategy()
    with strategy.scope(), distribution.scope(), refused():
        keras.Variable(1.0)
    with strategy.scope(), as_set(distribution), refused():
        _model()
    assert not keras_dist.has_strategy()
    with strategy.scope():
        _model().fit(X, X, verbose=0)


@each
def test_between_the_scope_and_the_methods_of_a_model(make, distribution):
    strategy = make()
    with strategy.scope():
        model = _model()
    before = model.get_weights()
    with as_set(distribution):
        for method, arguments in (
            (model.fit, (X, X)),
            (model.evaluate, (X, X)),
            (model.predict, (X,)),
            (model.train_on_batch, (X, X)),
        ):
            with refused():
                method(*arguments)
    assert_weights(model, before)
    model.fit(X, X, verbose=0)


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Only JAX lays variables out."
)
@each
def test_a_model_that_was_laid_out(make):
    strategy = make()
    with as_set(D.DataParallel(devices=DEVICES)):
        model = _model()
    with pytest.raises(StrategyMismatchError, match="kernel' has a layout"):
        strategy.distribute(model)


def test_a_distribution_alone_is_none_of_our_business(distribution):
    with as_set(distribution), keras_dist.get_strategy().scope():
        assert D.distribution() is distribution
