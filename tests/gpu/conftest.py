"""One GPU, or in a rehearsal CPU devices that stand in for it.

`python -m gpu` runs this folder without the `conftest.py` above it, which makes
virtual CPU devices and lets XLA optimize nothing. Under that one it is skipped.
"""

import contextlib
import importlib.util
import pathlib
import signal
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from gpu import lines  # noqa: E402
from gpu import places  # noqa: E402

# The other `conftest.py` has imported it.
IS_ALONE = "divided" not in sys.modules
if IS_ALONE:
    places.set_environment()

if importlib.util.find_spec("torch") and importlib.util.find_spec("tensorflow"):
    # The two only live in one process in this order.
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

import keras  # noqa: E402
import pytest  # noqa: E402

from gpu import facts as gpu_facts  # noqa: E402
from gpu.facts import facts  # noqa: E402, F401


def pytest_configure(config):
    noting = gpu_facts.Facts(lines.path())
    config.stash[gpu_facts.KEY] = noting
    config.pluginmanager.register(noting)


def pytest_collection_modifyitems(config, items):
    """Where the folder can't run, one test is left, which says so."""
    reason = _lack()
    own = [item for item in items if HERE in item.path.parents]
    if not own or not reason:
        return
    own[0].add_marker(pytest.mark.skip(reason=reason))
    config.hook.pytest_deselected(items=own[1:])
    items[:] = [item for item in items if item not in own[1:]]


def _lack():
    """Returns the sentence that says why the folder can't run, or `""`."""
    if not IS_ALONE:
        return (
            "The checks of a GPU have settings of their own: run `python -m "
            "gpu` in `tests/`, with `--rehearse` where there is no GPU."
        )
    missing = places.lack(1)
    return missing and f"{missing} `--rehearse` tries the checks without."


@pytest.fixture(autouse=True)
def _copies_are_made(monkeypatch):
    """Makes devices of different names count as apart on PyTorch's one CPU."""
    if places.IS_REHEARSAL and keras.backend.backend() == "torch":
        from keras_dist_torch import transfers

        monkeypatch.setattr(
            transfers, "are_apart", lambda here, there: here != there
        )


@pytest.fixture(autouse=True)
def _interrupts_arrive():
    """Undoes what a shell does to commands that it starts with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def _fresh_keras_session():
    yield
    keras.utils.clear_session()
