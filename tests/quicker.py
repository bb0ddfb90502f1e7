"""TensorFlow that starts programs sooner and runs them no differently.

Tests trace thousands of functions and run each a few times, and much of their
time would go into making them fast. Programs that tests start in processes of
their own run as users' programs do.
"""

import keras


def compile_less():
    """Leaves out what only pays for programs that run for long."""
    if keras.backend.backend() == "tensorflow":
        # Grappler rewrites each traced function before its first call.
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": True}
        )
