"""The `keras-dist` command line.

It is a package beside `keras_dist`, not in it: importing anything under
`keras_dist` imports Keras, and Keras reads KERAS_BACKEND once, on import. The
command has to choose the backend before that. So nothing here imports Keras at
module level; the parts of commands that use Keras are in `keras_dist/launch/`.
"""
