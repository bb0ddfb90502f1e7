"""The `keras-dist` command line.

A package beside `keras_dist`, not in it: importing anything under `keras_dist`
imports Keras, and Keras reads KERAS_BACKEND once, on import. The command has
to choose the backend before that. So nothing here imports Keras at module
level; what a command does with Keras is in `keras_dist/launch/`.
"""
