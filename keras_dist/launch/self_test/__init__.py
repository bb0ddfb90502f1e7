"""The parts of `keras-dist test` and `keras-dist info` that use Keras.

Each backend has a process of its own, `python -m keras_dist.launch.self_test`,
which describes what it sees and then does one job after another.
"""
