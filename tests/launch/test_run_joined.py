"""A worker of `keras-dist run` that never joins the others is an error."""

import pytest

from keras_dist.launch.failures import Failure
from keras_dist.launch.failures import first

pytestmark = pytest.mark.runs_on("torch")

JOIN = "pathlib.Path(os.environ['KERAS_DIST_JOINED_FILE']).touch()"


def run(launcher, body, *options, workers=2):
    return launcher.run(
        *("--workers", workers, *options, launcher.script(body)),
        KERAS_DIST_INDEPENDENT="0",
    )


def test_one_that_ends_without_having_joined(launcher):
    """It is an error at once, though the others wait, and no restart."""
    body = f"print('here', flush=True)\nif index == 0:\n    {JOIN}\n    sleep()"
    done = run(launcher, body, "--max-restarts", 3)
    assert done.returncode == 1
    assert (
        "worker 1 ended without having joined the other workers" in done.stderr
    )
    assert "MultiWorkerMirroredStrategy" in done.stderr
    assert "--independent" in done.stderr
    assert done.stdout.count("[worker 1] here") == 1
    assert "restart" not in done.stderr


def test_one_that_joined_before_a_restart_has_to_join_again(launcher):
    body = f"if not restarts:\n    {JOIN}\n    sys.exit(3)"  # all joined
    done = run(launcher, body, "--max-restarts", 1)
    assert done.returncode == 1
    assert "without having joined" in done.stderr


def test_its_own_error_is_what_shows(launcher):
    done = run(launcher, "if index: raise KeyError('its own')\nsleep()")
    assert done.returncode == 1
    assert "KeyError: 'its own'" in done.stderr
    assert "without having joined" not in done.stderr


@pytest.mark.parametrize(
    ("options", "workers"), [(("--independent",), 2), ((), 1)]
)
def test_those_that_need_not_join(launcher, options, workers):
    body = "print(os.environ['KERAS_DIST_INDEPENDENT'])"
    done = run(launcher, body, *options, workers=workers)
    assert done.returncode == 0, done.stderr
    assert f"[worker 0] {int(workers == 2)}\n" in done.stdout


def test_an_error_comes_before_one_that_stayed_alone():
    alone = Failure("worker 0", 0, stayed_alone=True)
    assert alone.exit_status == 1
    failed = Failure("worker 1", 2)
    assert first([alone, failed]) is failed
