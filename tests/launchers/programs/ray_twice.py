"""Trains with two trainers, one after the other, in one session of Ray."""

import os
import pathlib

import ray_jax


def main():
    """Starts the program of JaxTrainer, and its trainer once more."""
    ray_jax.main()
    os.replace("digits.keras", "first.keras")
    ray_jax.ray.init = lambda **kwargs: None  # it runs already
    ray_jax.main()
    print(f"both are written: {pathlib.Path('digits.keras').exists()}")


if __name__ == "__main__":
    main()
