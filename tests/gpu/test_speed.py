"""One GPU under a strategy costs what plain Keras costs."""

import pytest

from gpu import bench
from gpu import places

MOST = 1.02


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """What `bench fit` measured last, by model."""
    for _ in range(bench.TRIES):
        found = bench.measured(
            tmp_path_factory.mktemp("bench"), "fit", "--replicas", "1"
        )
        if not any(map(bench.is_noise, found)):
            break
    return {setting["model"]: setting for setting in found}


@pytest.mark.parametrize("model", bench.MODELS)
def test_time(model, settings, facts):
    setting = settings[model]
    bench.note(facts, setting, "Keras")
    assert setting["devices"] == [places.DEVICE]
    ratio = bench.ratio(setting, "ours/Keras")
    assert ratio > 0
    if facts.is_shown(
        f"time of `fit` at most {MOST} of plain Keras', {model}",
        "a rehearsal measures too briefly, and no GPU",
    ):
        assert ratio <= MOST, f"A/A is {setting['noise']['median']:.3f}."


@pytest.mark.parametrize("model", bench.MODELS)
def test_python_calls(model, settings):
    calls = settings[model]["counts"]["calls"]
    # A call in some steps only is no call of a step.
    assert 0 < calls["ours"] < calls["Keras"] + 1
