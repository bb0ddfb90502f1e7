"""The code that runs in replicas: context, state, variables, gradients."""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
