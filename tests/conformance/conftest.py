"""The grid of strategies, and the original beside ours.

With KERAS_DIST_ORIGINAL set, and on TensorFlow, the original is tested too.
With KERAS_DIST_FOURTH set, and on PyTorch, the backend of `fourth.py` is.
"""

import os

import keras
import pytest

import keras_dist
from keras_dist.plugins import override_backend

BACKEND = keras.backend.backend()
CPUS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
# The original is no code of ours: it is checked when its version changes.
ORIGINAL = bool(os.environ.get("KERAS_DIST_ORIGINAL"))
FOURTH = bool(os.environ.get("KERAS_DIST_FOURTH"))
GRID = {
    "default": lambda api: api.get_strategy(),
    "one_device": lambda api: api.OneDeviceStrategy("cpu:1"),
    "mirrored1": lambda api: api.MirroredStrategy(CPUS[:1]),
    "mirrored2": lambda api: api.MirroredStrategy(CPUS[:2]),
    "mirrored3": lambda api: api.MirroredStrategy(CPUS[:3]),
    "mirrored4": lambda api: api.MirroredStrategy(CPUS),
}


def pytest_generate_tests(metafunc):
    if "api" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("contract")
    original_too = mark is not None and mark.kwargs.get("native", True)
    names = ["keras_dist"]
    if BACKEND == "tensorflow" and original_too and ORIGINAL:
        names.append("native")
    names = getattr(metafunc.module, "APIS", names)
    metafunc.parametrize("api", names, indirect=True)


@pytest.fixture(autouse=FOURTH)
def fourth():
    """The tests' backend, if it is that of `fourth.py`."""
    from conformance.fourth import FourthBackend

    with override_backend(FourthBackend()):
        yield


@pytest.fixture
def api(request):
    """`keras_dist`, or on TensorFlow also the original in its clothes."""
    if request.param == "keras_dist":
        yield keras_dist
        return
    from conformance import native

    yield native
    left = native.leave_scopes()
    assert not left, f"The test left scopes of the original behind: {left}"


@pytest.fixture(params=GRID)
def strategy(request, api):
    """Each strategy of the grid."""
    return GRID[request.param](api)


@pytest.fixture(params=[name for name in GRID if name != "default"])
def scoped(request, api):
    """Each strategy of the grid whose scope changes what is current."""
    return GRID[request.param](api)


@pytest.fixture(params=[2, 3, 4])
def mirrored(request, api):
    """A `MirroredStrategy` of 2, 3 and 4 replicas."""
    return api.MirroredStrategy(CPUS[: request.param])


@pytest.fixture
def two(api):
    """A `MirroredStrategy` of 2 replicas."""
    return api.MirroredStrategy(CPUS[:2])


@pytest.fixture(params=["default", "one_device", "mirrored1"])
def single(request, api):
    """Each strategy with one replica."""
    return GRID[request.param](api)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    # A test keeps its arguments until the next one, and with a strategy its
    # replicas' threads, that would look as if they had been left behind.
    item.funcargs.clear()
