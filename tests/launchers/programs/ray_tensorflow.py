"""Trains on 2 workers of Ray Train's TensorflowTrainer."""

import os

import ray
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    import digits  # imports Keras: in a worker, not where Ray is started

    digits.train(config["path"])


def main():
    """Starts Ray and the trainer."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": backend}})
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"path": os.path.abspath("digits.keras")},
        scaling_config=ScalingConfig(num_workers=2),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
