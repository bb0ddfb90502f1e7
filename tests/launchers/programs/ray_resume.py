"""Goes on after a worker of Ray Train was lost, with BackupAndRestore."""

import os
import pathlib
import signal

import ray
from ray.train import FailureConfig
from ray.train import RunConfig
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    import digits
    import keras

    folder = pathlib.Path(config["folder"])

    class Lost(keras.callbacks.Callback):
        """Ends worker 1 in the third epoch, as a lost machine would, once."""

        def on_epoch_begin(self, epoch, logs=None):
            print(f"epoch {epoch}")
            is_second = ray.train.get_context().get_world_rank() == 1
            if epoch == 2 and is_second and not (folder / "lost").exists():
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    digits.train(folder / "digits.keras", [backup, Lost()])


def main():
    """Starts Ray and the trainer."""
    backend = os.environ.get("KERAS_BACKEND", "torch")
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": backend}})
    trainer = TorchTrainer(
        train,
        # A folder that all workers see, also after a restart.
        train_loop_config={"folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
