"""Trains on 2 workers of Ray Train's TorchTrainer."""

import os

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    import digits  # imports Keras: in a worker, not where Ray is started

    digits.train(config["path"])


def main():
    """Starts Ray and the trainer."""
    backend = os.environ.get("KERAS_BACKEND", "torch")
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": backend}})
    trainer = TorchTrainer(
        train,
        train_loop_config={"path": os.path.abspath("digits.keras")},
        scaling_config=ScalingConfig(num_workers=2),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
