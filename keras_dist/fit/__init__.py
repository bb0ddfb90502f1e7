"""Keras' models, optimizers, metrics and layers on replicas."""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
