"""The `keras-dist` command line.

Keras reads KERAS_BACKEND once, on import, and the command has to choose the
backend before that. So nothing here imports Keras at module level; the parts
of commands that use Keras are in `keras_dist/cli/jobs/`.
"""
