"""The doors to Keras' private names."""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
