"""Distributed input: from a user's data to a batch on each replica's device.

```
data ──source_of──> Source ──feed──> parts of each replica ──> placed
```
"""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401
