"""An optimizer's state in parts, one for each replica."""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
