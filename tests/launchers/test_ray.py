"""Workers of Ray Train, and actors of Ray, have one device's weights."""

import importlib.util
import re
import sys

import pytest

from launchers import programs


@pytest.fixture(autouse=True)
def _ray():
    if importlib.util.find_spec("ray") is None:
        pytest.fail(
            f"Ray is not installed. Install {programs.PACKAGES['ray']}, or "
            "choose other tests with -k.",
            pytrace=False,
        )


@pytest.fixture
def run(tmp_path):
    """Runs a program of Ray, whose files end up in the test's folder."""

    def run_program(name, backend):
        return programs.run(
            [sys.executable, name],
            tmp_path,
            KERAS_BACKEND=backend,
            HOME=str(tmp_path),
            RAY_DEDUP_LOGS="0",
            # The result of a train loop's `print` is one line then.
            RAY_TRAIN_ENABLE_PRINT_PATCH="0",
            RAY_USAGE_STATS_ENABLED="0",
        )

    return run_program


@pytest.mark.parametrize(
    ("name", "backend", "found"),
    [
        ("ray_jax.py", "jax", "this is a worker of Ray Train"),
        ("ray_torch.py", "torch", "torchrun's RANK and WORLD_SIZE are set"),
        ("ray_torch.py", "jax", "torchrun's RANK and WORLD_SIZE are set"),
        ("ray_tensorflow.py", "tensorflow", "TF_CONFIG is set"),
        ("ray_actors.py", "jax", "KERAS_DIST_WORKERS is set"),
        ("ray_actors.py", "tensorflow", "KERAS_DIST_WORKERS is set"),
        ("ray_actors.py", "torch", "KERAS_DIST_WORKERS is set"),
    ],
)
def test_two_workers(run, check, name, backend, found):
    output = run(name, backend)
    assert f"{found}: 2 workers, this is worker 0" in output
    check(output, backend)


def test_two_trainers_in_succession(run, one_device, tmp_path):
    output = run("ray_twice.py", "jax")
    assert len(programs.shown_weights(output)) == 4, output[-6000:]
    for name in ("first.keras", "digits.keras"):
        programs.check_equal(
            programs.weights(tmp_path / name), one_device("jax")
        )


def test_a_trainer_goes_on_after_a_worker_was_lost(run, check):
    output = run("ray_resume.py", "torch")
    epochs = re.findall(r"\bepoch (\d)", output)
    # Both workers reach the third epoch twice: it was not complete.
    assert sorted(epochs) == sorted("00112233" + "22"), output[-6000:]
    check(output, "torch")


@pytest.mark.parametrize("backend", programs.BACKENDS)
def test_an_actor_is_lost(run, backend):
    output = run("ray_lost_actor.py", backend)
    assert re.search(
        r"^worker 0: WorkerLostError: .*[Ww]orker 1", output, re.MULTILINE
    ), output[-6000:]
    assert "worker 1: ActorDiedError" in output
