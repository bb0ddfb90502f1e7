"""Trains on 2 workers of Ray Train's JaxTrainer."""

import os

import ray
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxConfig
from ray.train.v2.jax import JaxTrainer


def train(config):
    import digits  # imports Keras: in a worker, not where Ray is started

    digits.train(config["path"])


def main():
    """Starts Ray and the trainer."""
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": "jax"}})
    trainer = JaxTrainer(
        train,
        train_loop_config={"path": os.path.abspath("digits.keras")},
        # The strategy connects the workers. Ray would do so for GPUs.
        jax_config=JaxConfig(),
        scaling_config=ScalingConfig(num_workers=2),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
