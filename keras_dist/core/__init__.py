"""Data that everything else is made of: plans, devices, values, options."""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
