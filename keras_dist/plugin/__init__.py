"""The interface between the front end and a backend."""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
