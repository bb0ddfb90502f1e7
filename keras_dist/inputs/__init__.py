"""Distributed input: reads data and puts batches on the replicas' devices."""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
